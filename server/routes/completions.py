"""POST /v1/completions."""

import asyncio

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.answer import Answer, collect_all, finish_of
from server.context import ServerContext
from server.convert import make_requests, token_details
from server.handler import answered
from server.prompt import encode_prompts
from server.schema.completions import CompletionChoice, CompletionRequest, CompletionResponse
from server.schema.fields import COMPLETION
from server.stream import CompletionFrames, stream_answer

DEFAULT_MAX_TOKENS = 16


async def completions(http: HttpRequest) -> Response:
    """One continuation, or n, of each prompt."""
    return await answered(http, CompletionRequest, COMPLETION, "cmpl-", reply)


async def reply(context: ServerContext, wire: CompletionRequest, answer: Answer) -> Response:
    """Encode, submit, and stream or collect."""
    started = asyncio.get_running_loop().time()
    limits = context.limits
    requests = make_requests(
        wire,
        await encode_prompts(wire, context.engine.tokenizer, limits),
        answer.id,
        limits,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        prompt_param="prompt",
    )
    await answer.submit(context.engine, requests, n=wire.n or 1)
    context.metrics.request_params(answer.n)
    details = token_details(wire)
    if wire.stream:
        return stream_answer(context.config, CompletionFrames(answer, wire.stream_options, details), started)
    deltas = await collect_all(answer.streams)
    response = CompletionResponse(
        id=answer.id,
        object="text_completion",
        created=answer.created,
        model=answer.model,
        system_fingerprint=answer.fingerprint,
        choices=[
            CompletionChoice(
                index=index,
                text=delta.text,
                logprobs=details.completion(delta.tokens),
                finish_reason=finish_of(delta),
                stop_reason=delta.stop_reason,
                prompt_token_ids=answer.prompt_ids(index) if details.has_ids else None,
                **details.ids(delta.tokens),
            )
            for index, delta in enumerate(deltas)
        ],
        usage=answer.usage(),
    )
    return Response(response.model_dump_json(), media_type="application/json")
