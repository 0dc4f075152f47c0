"""POST /v1/chat/completions."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.answer import Answer, Delta, chat_finish_of, render
from server.context import ServerContext
from server.convert import beam_params, make_requests, token_details
from server.endpoint import Endpoint, run_generation
from server.logprobs import TokenDetails
from server.parsing.answer_format import AnswerFormat
from server.parsing.events import Message
from server.parsing.output import ParsedDelta
from server.prompt import encode_chat
from server.routes.openai.frames import ChatFrames
from server.routes.openai.parsed_chat_frames import ParsedChatFrames
from server.schema.chat import AssistantMessage, ChatChoice, ChatChunk, ChatRequest, ChatResponse
from server.schema.refused_fields import UnsupportedField
from server.schema.tools import AnswerFunction, AnswerToolCall
from server.stream import stream_answer


async def chat_completions(http: HttpRequest) -> Response:
    """One answer, or n, to a conversation."""
    return await run_generation(http, ChatRequest, "chatcmpl-", reply)


async def submit(
    context: ServerContext, wire: ChatRequest, answer: Answer, default_max_tokens: int | None = None
) -> None:
    """Encode a conversation and submit its n requests. A default longer than the context is cut to fit.

    Where tools may be called or the model reasons, the answer's deltas are ParsedDeltas.
    """
    limits, tokenizer = context.limits, context.engine.tokenizer
    answer_format = AnswerFormat.of(wire, context.formats)
    prompt = await encode_chat(wire, tokenizer, limits, context.formats)
    if default_max_tokens is None:
        default_max_tokens = limits.generation_defaults.get("max_new_tokens") or None
    requests = await make_requests(
        wire,
        [prompt],
        answer.id,
        limits,
        default_max_tokens=default_max_tokens,
        prompt_param="messages",
    )
    if (beams := beam_params(wire)) is not None:
        if answer_format:
            raise UnsupportedField(
                "use_beam_search is not available where tools may be called or the model reasons.",
                "use_beam_search",
            )
        answer.submit_beams(context.engine, requests, len(requests), beams, limits)
        context.metrics.request_params(answer.n)
        return
    setup = (
        await answer_format.setup(prompt, tokenizer, requests[0].sampling.grammar) if answer_format else None
    )
    await answer.submit(context.engine, requests, len(requests), setup)
    context.metrics.request_params(answer.n)


async def reply(context: ServerContext, wire: ChatRequest, answer: Answer) -> Response:
    """Submit, and stream or collect."""
    await submit(context, wire, answer)
    details = token_details(wire)
    if wire.stream:
        frames = ParsedChatFrames if answer.is_parsed else ChatFrames
        return stream_answer(context.config, frames(answer, wire.stream_options, details))
    deltas = await answer.collect()
    return await render(
        lambda: response_of(answer, deltas, details).model_dump_json(exclude_unset=True), deltas
    )


def response_of(answer: Answer, deltas: list[Delta], details: TokenDetails) -> ChatResponse:
    """The body of the answer."""
    return ChatResponse(
        id=answer.id,
        object="chat.completion",
        created=answer.created,
        model=answer.model,
        system_fingerprint=answer.fingerprint,
        choices=[
            ChatChoice(
                index=index,
                message=message(delta),
                logprobs=details.chat(delta.tokens),
                finish_reason=chat_finish_of(delta),
                stop_reason=delta.stop_reason,
                **details.ids(delta.tokens),
            )
            for index, delta in enumerate(deltas)
        ],
        usage=answer.usage(),
        prompt_token_ids=answer.prompt_ids(0) if details.has_ids else None,
        prompt_logprobs=details.prompt(deltas[0].prompt_tokens),
    )


def message(delta: Delta) -> AssistantMessage:
    """Return the whole answer, with reasoning and calls if any; beside calls content may be null."""
    if not isinstance(delta, ParsedDelta):
        return AssistantMessage(role="assistant", content=delta.text, refusal=None)
    whole = Message.of(delta.events)
    fields: dict[str, Any] = {}
    if whole.reasoning:
        fields["reasoning_content"] = whole.reasoning
    if whole.calls:
        fields["tool_calls"] = [
            AnswerToolCall(
                id=call.id,
                type="function",
                function=AnswerFunction(name=call.name, arguments=call.arguments),
            )
            for call in whole.calls
        ]
    content = whole.content or (None if whole.calls else "")
    return AssistantMessage(role="assistant", content=content, refusal=None, **fields)


ENDPOINT = Endpoint(
    "POST",
    ("/v1/chat/completions",),
    chat_completions,
    ChatResponse,
    ChatRequest,
    ChatChunk,
    example={"messages": [{"role": "user", "content": "Hello!"}]},
)
