"""POST /, /generate and /generate_stream, in the words of TGI or of LightLLM, as `generate_api` says."""

from collections.abc import Callable
from typing import NamedTuple

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.answer import Answer, Delta, render
from server.context import ServerContext, context_of
from server.convert import make_requests
from server.endpoint import Endpoint, run_generation
from server.errors import NATIVE, renamed_fields
from server.prompt import encode_prompt
from server.routes.native import lightllm, tgi
from server.routes.native.convert import NAMES, Defaults, completion_request
from server.schema.native import GenerateEvent, GenerateRequest, GenerateResponse
from server.stream import Frames, stream_answer


class Dialect(NamedTuple):
    """What differs between the two servers."""

    defaults: Defaults
    check: Callable[[GenerateRequest], None]
    response: Callable[[GenerateRequest, Answer, list[Delta]], BaseModel]
    frames: Callable[[Answer, GenerateRequest], Frames]


DIALECTS = {
    "tgi": Dialect(tgi.DEFAULTS, tgi.check, tgi.response, tgi.TgiFrames),
    "lightllm": Dialect(lightllm.DEFAULTS, lightllm.check, lightllm.response, lightllm.LightllmFrames),
}


async def generate(http: HttpRequest) -> Response:
    """One continuation of a text; streamed if `stream` is true."""
    return await run_generation(http, GenerateRequest, "gen-", reply)


async def generate_stream(http: HttpRequest) -> Response:
    """One continuation of a text, streamed."""

    async def stream(context: ServerContext, wire: GenerateRequest, answer: Answer) -> Response:
        return await reply(context, wire.model_copy(update={"stream": True}), answer)

    return await run_generation(http, GenerateRequest, "gen-", stream)


async def generate_compat(http: HttpRequest) -> Response:
    """One continuation of a text, as /generate; TGI puts the answer in a list here."""
    response = await generate(http)
    if context_of(http).config.generate_api == "tgi" and response.media_type == "application/json":
        return Response(b"[" + bytes(response.body) + b"]", media_type="application/json")
    return response


async def reply(context: ServerContext, wire: GenerateRequest, answer: Answer) -> Response:
    """Submit as a completion, and stream or collect."""
    dialect = DIALECTS[context.config.generate_api]
    dialect.check(wire)
    await submit(context, wire, answer, dialect.defaults)
    if wire.stream:
        return stream_answer(context.config, dialect.frames(answer, wire))
    deltas = await answer.collect()
    return await render(lambda: dialect.response(wire, answer, deltas).model_dump_json(), deltas)


async def submit(context: ServerContext, wire: GenerateRequest, answer: Answer, defaults: Defaults) -> None:
    """Encode the text and submit its n requests."""
    limits = context.limits
    special = wire.parameters.add_special_tokens is not False
    ids = await encode_prompt(
        wire.inputs, context.engine.tokenizer, limits, add_special_tokens=special, param="inputs"
    )
    with renamed_fields(NAMES):
        completion = completion_request(wire, defaults, limits)
        requests = await make_requests(
            completion,
            [ids[-(wire.parameters.truncate or 0) :]],
            answer.id,
            limits,
            default_max_tokens=defaults.max_new_tokens,
            prompt_param="inputs",
        )
        await answer.submit(context.engine, requests, n=len(requests))
        context.metrics.request_params(answer.n)


ENDPOINTS = tuple(
    Endpoint(
        "POST",
        (path,),
        handler,
        GenerateResponse,
        GenerateRequest,
        GenerateEvent,
        NATIVE,
        example={"inputs": "Once upon a time", "parameters": {"max_new_tokens": 16}},
    )
    for path, handler in (
        ("/generate", generate),
        ("/generate_stream", generate_stream),
        ("/", generate_compat),
    )
)
