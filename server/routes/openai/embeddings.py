"""POST /v1/embeddings."""

import asyncio
import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.errors import InvalidRequest, StepFailed
from engine.readouts import PooledHidden
from engine.request import Request, SamplingParams
from server.answer import Answer, collect_all
from server.context import ServerContext
from server.endpoint import Endpoint, run_generation
from server.limits import check_num_answers, room_after
from server.parsing.output import ParsedStream
from server.prompt import encode_each
from server.schema.embeddings import EmbeddingsRequest, EmbeddingsResponse, EmbeddingsUsage

if TYPE_CHECKING:
    from engine import RequestStream


async def embeddings(http: HttpRequest) -> Response:
    """One vector for each input: pooled hidden states, of length 1."""
    return await run_generation(http, EmbeddingsRequest, "embd-", reply)


async def reply(context: ServerContext, wire: EmbeddingsRequest, answer: Answer) -> Response:
    """Encode, submit, collect."""
    hidden_size = context.engine.model.hidden_size
    if wire.dimensions is not None and wire.dimensions > hidden_size:
        raise InvalidRequest(f"dimensions must be at most {hidden_size} for this model.", "dimensions")
    await answer.submit(context.engine, await make_requests(context, wire, answer.id), n=1)
    await collect_all(answer.streams)
    body = await asyncio.to_thread(render, answer, wire.dimensions, wire.encoding_format == "base64")
    return Response(body, media_type="application/json")


async def make_requests(context: ServerContext, wire: EmbeddingsRequest, answer_id: str) -> list[Request]:
    """A request for each input. Raises InvalidRequest, ContextLengthExceeded."""
    limits = context.limits
    check_num_answers(len(wire.input), limits, "input")
    prompts = await encode_each(
        wire.input,
        context.engine.tokenizer,
        limits,
        add_special_tokens=wire.add_special_tokens is not False,
        param="input",
    )
    requests: list[Request] = []
    for token_ids in prompts:
        room_after(len(token_ids), limits, "input")
        requests.append(
            Request(
                f"{answer_id}-{len(requests)}",
                tuple(token_ids),
                SamplingParams(max_tokens=0),
                use_prefix_cache=wire.cache_prompt is not False,
                cache_salt=wire.cache_salt,
                readouts=(PooledHidden(context.engine.config.pooling),),
            )
        )
    return requests


def render(answer: Answer, dimensions: int | None, as_base64: bool) -> bytes:
    """The body of an answer, an EmbeddingsResponse.

    Vector after vector and not all at once: a thousand of them would hold the GIL for a second.
    """
    data = b",".join(
        b'{"object":"embedding","index":%d,"embedding":%s}' % (index, encoded)
        for index, encoded in enumerate(encode(answer.streams, dimensions, as_base64))
    )
    num_tokens = sum(stream.num_prompt_tokens for stream in answer.streams)
    usage = EmbeddingsUsage(prompt_tokens=num_tokens, total_tokens=num_tokens).model_dump_json().encode()
    model = orjson.dumps(answer.model)
    return b'{"object":"list","data":[%s],"model":%s,"usage":%s}' % (data, model, usage)


def encode(
    streams: Sequence["RequestStream | ParsedStream"], dimensions: int | None, as_base64: bool
) -> list[bytes]:
    """The vector of each stream as JSON."""
    encoded: list[bytes] = []
    for stream in streams:
        assert not isinstance(stream, ParsedStream), "an embedding is no text"
        pooled = stream.readout(PooledHidden)
        if not np.isfinite(pooled).all():
            raise StepFailed("The model computed no finite numbers for this input.")
        vector = normalised(pooled[:dimensions])
        if as_base64:
            encoded.append(b'"%s"' % base64.b64encode(vector.astype("<f4").tobytes()))
        else:
            encoded.append(orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY))
    return encoded


def normalised(vector: np.ndarray) -> np.ndarray:
    """A vector fp32 [size] scaled to length 1; one of zeros stays."""
    scaled: np.ndarray = vector / max(float(np.linalg.norm(vector)), np.finfo(np.float32).tiny)
    return scaled.astype(np.float32)


ENDPOINT = Endpoint(
    "POST",
    ("/v1/embeddings",),
    embeddings,
    EmbeddingsResponse,
    EmbeddingsRequest,
    example={"input": "Hello!"},
)
