"""POST /v1/completions."""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.answer import Answer, Delta, finish_of, render
from server.context import ServerContext
from server.convert import beam_params, make_requests, token_details
from server.endpoint import Endpoint, run_generation
from server.logprobs import TokenDetails, mean_logprob
from server.prompt import encode_prompts
from server.routes.openai.echo import Echo
from server.routes.openai.frames import CompletionFrames
from server.schema.completions import CompletionChoice, CompletionChunk, CompletionRequest, CompletionResponse
from server.stream import stream_answer

DEFAULT_MAX_TOKENS = 16


async def completions(http: HttpRequest) -> Response:
    """One continuation, or n, of each prompt."""
    return await run_generation(http, CompletionRequest, "cmpl-", reply)


async def reply(context: ServerContext, wire: CompletionRequest, answer: Answer) -> Response:
    """Encode, submit, and stream or collect."""
    limits = context.limits
    prompts = await encode_prompts(wire, context.engine.tokenizer, limits)
    requests = await make_requests(
        wire,
        prompts,
        answer.id,
        limits,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        prompt_param="prompt",
    )
    echo = await Echo.of(wire, prompts, context.engine.tokenizer)
    if (beams := beam_params(wire)) is not None:
        answer.submit_beams(context.engine, requests, wire.num_samples, beams, limits)
    else:
        await answer.submit(context.engine, requests, n=wire.num_samples)
    context.metrics.request_params(answer.n)
    details = token_details(wire)
    if wire.stream:
        frames = CompletionFrames(answer, wire.stream_options, details, echo)
        return stream_answer(context.config, frames)
    deltas = await answer.collect()
    return await render(
        lambda: response_of(answer, deltas, wire.n or 1, details, echo).model_dump_json(), deltas
    )


def response_of(
    answer: Answer, deltas: list[Delta], n: int, details: TokenDetails, echo: Echo
) -> CompletionResponse:
    """The body of the answer: of the samples of each prompt the `n` best ones."""
    choices: list[CompletionChoice] = []
    for first in range(0, len(deltas), answer.n):
        samples = deltas[first : first + answer.n]
        prompt_tokens = samples[0].prompt_tokens
        if n < answer.n:
            samples = sorted(samples, key=lambda delta: mean_logprob(delta.tokens), reverse=True)[:n]
        text = echo.text(first)
        choices += (
            CompletionChoice(
                index=index,
                text=text + delta.text,
                logprobs=details.completion(delta.tokens, prompt_tokens if echo else (), len(text)),
                finish_reason=finish_of(delta),
                stop_reason=delta.stop_reason,
                prompt_token_ids=answer.prompt_ids(first) if details.has_ids else None,
                prompt_logprobs=details.prompt(prompt_tokens),
                **details.ids(delta.tokens),
            )
            for index, delta in enumerate(samples, len(choices))
        )
    return CompletionResponse(
        id=answer.id,
        object="text_completion",
        created=answer.created,
        model=answer.model,
        system_fingerprint=answer.fingerprint,
        choices=choices,
        usage=answer.usage(),
    )


ENDPOINT = Endpoint(
    "POST",
    ("/v1/completions",),
    completions,
    CompletionResponse,
    CompletionRequest,
    CompletionChunk,
    example={"prompt": "Once upon a time", "max_tokens": 16},
)
