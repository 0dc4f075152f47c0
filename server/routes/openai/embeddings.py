"""POST /v1/embeddings."""

import asyncio
import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.errors import InvalidRequest
from engine.readouts import PooledHidden
from server.answer import Answer
from server.context import ServerContext
from server.endpoint import Endpoint, run_generation
from server.parsing.output import ParsedStream
from server.routes.openai.inputs import compute, finite_readout
from server.schema.embeddings import EmbeddingsRequest, EmbeddingsResponse, EmbeddingsUsage

if TYPE_CHECKING:
    from engine import ModelInfo, RequestStream


async def embeddings(http: HttpRequest) -> Response:
    """One vector for each input: pooled hidden states, of length 1. A chat model's are poor for search."""
    return await run_generation(http, EmbeddingsRequest, "embd-", reply)


async def reply(context: ServerContext, wire: EmbeddingsRequest, answer: Answer) -> Response:
    """Compute the vectors, and write them."""
    model = context.engine.model
    if wire.dimensions is not None:
        check_dimensions(wire.dimensions, model)
    await compute(context, wire, answer, PooledHidden(model.pooling))
    body = await asyncio.to_thread(render, answer, wire.dimensions, wire.encoding_format == "base64")
    return Response(body, media_type="application/json")


def check_dimensions(size: int, model: "ModelInfo") -> None:
    """Refuse a size that the model's vectors were not trained to be cut to. Raises InvalidRequest."""
    if size in model.embedding_sizes:
        return
    if size > model.hidden_size or model.matryoshka:
        sizes = ", ".join(map(str, model.embedding_sizes))
        allowed = f"at most {model.hidden_size}" if model.matryoshka is True else sizes
        raise InvalidRequest(f"dimensions must be {allowed} for this model.", "dimensions")
    raise InvalidRequest(
        f"dimensions must be {model.hidden_size}: this model's vectors were not trained to be cut (its "
        "config.json has neither is_matryoshka nor matryoshka_dimensions).",
        "dimensions",
    )


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
        vector = normalised(finite_readout(stream, PooledHidden)[:dimensions])
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
