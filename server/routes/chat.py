"""POST /v1/chat/completions."""

import asyncio

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.answer import Answer, collect_all, finish_of
from server.context import ServerContext
from server.convert import make_requests, token_details
from server.handler import answered
from server.prompt import encode_chat
from server.schema.chat import AssistantMessage, ChatChoice, ChatRequest, ChatResponse
from server.schema.fields import CHAT
from server.stream import ChatFrames, stream_answer


async def chat_completions(http: HttpRequest) -> Response:
    """One answer, or n, to a conversation."""
    return await answered(http, ChatRequest, CHAT, "chatcmpl-", reply)


async def submit(
    context: ServerContext, wire: ChatRequest, answer: Answer, default_max_tokens: int | None = None
) -> None:
    """Encode a conversation and submit its n requests. A default longer than the context is cut to fit."""
    limits = context.limits
    requests = make_requests(
        wire,
        [await encode_chat(wire, context.engine.tokenizer, limits)],
        answer.id,
        limits,
        default_max_tokens=default_max_tokens or limits.generation_defaults.get("max_new_tokens"),
        prompt_param="messages",
    )
    answer.submit(context.engine, requests, n=len(requests))
    context.metrics.request_params(answer.n)


async def reply(context: ServerContext, wire: ChatRequest, answer: Answer) -> Response:
    """Submit, and stream or collect."""
    started = asyncio.get_running_loop().time()
    await submit(context, wire, answer)
    details = token_details(wire)
    if wire.stream:
        return stream_answer(context.config, ChatFrames(answer, wire.stream_options, details), started)
    deltas = await collect_all(answer.streams)
    response = ChatResponse(
        id=answer.id,
        object="chat.completion",
        created=answer.created,
        model=answer.model,
        system_fingerprint=answer.fingerprint,
        choices=[
            ChatChoice(
                index=index,
                message=AssistantMessage(role="assistant", content=delta.text),
                logprobs=details.chat(delta.tokens),
                finish_reason=finish_of(delta),
                stop_reason=delta.stop_reason,
                **details.ids(delta.tokens),
            )
            for index, delta in enumerate(deltas)
        ],
        usage=answer.usage(),
        prompt_token_ids=answer.prompt_ids(0) if details.has_ids else None,
    )
    return Response(response.model_dump_json(), media_type="application/json")
