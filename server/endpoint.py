"""What every route with a body does around its own work."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.answer import Answer, while_connected
from server.body import read_json
from server.context import ServerContext, context_of
from server.schema.anthropic import CountTokensRequest
from server.schema.embeddings import EmbeddingsRequest
from server.schema.native import GenerateRequest
from server.schema.refused_fields import Refused, unknown_fields
from server.schema.sampling import SamplingRequest
from server.schema.tokenize import DetokenizeRequest, TokenizeRequest, TokensRequest

Wire = TypeVar(
    "Wire",
    bound=SamplingRequest
    | GenerateRequest
    | EmbeddingsRequest
    | TokenizeRequest
    | DetokenizeRequest
    | TokensRequest
    | CountTokensRequest,
)


async def read_request(
    http: HttpRequest, schema: type[Wire], refused: dict[str, Refused]
) -> tuple[Wire, str]:
    """The checked body, and the name of the model to answer with.

    Raises NotReady, what read_json() raises, ModelNotFound.
    """
    context = context_of(http)
    wire = await read_json(http, schema, refused)
    context.note_unknown_fields(unknown_fields(wire.model_extra, refused))
    return wire, context.model_name(wire.model)


async def run_plain(
    http: HttpRequest,
    schema: type[Wire],
    refused: dict[str, Refused],
    reply: Callable[[ServerContext, Wire], Awaitable[Response]],
) -> Response:
    """Read and check the body of what generates nothing, and `reply` unless the client leaves meanwhile.

    Raises what read_request() raises, ClientGone, DeadlinePassed.
    """
    context = context_of(http)
    wire, _ = await read_request(http, schema, refused)
    return await while_connected(http, context.config.request_timeout_seconds, lambda: reply(context, wire))


async def run_generation(
    http: HttpRequest,
    schema: type[Wire],
    refused: dict[str, Refused],
    id_prefix: str,
    reply: Callable[[ServerContext, Wire, Answer], Awaitable[Response]],
) -> Response:
    """Read and check the body, begin an answer, and `reply` unless the client leaves or the time is up.

    Raises Draining, EngineDead, what read_request() raises, ClientGone, DeadlinePassed.
    """
    context = context_of(http)
    context.check_ready()
    wire, name = await read_request(http, schema, refused)
    answer = Answer(id_prefix, name, context.engine.model)
    http.state.answer = answer
    return await while_connected(
        http, context.config.request_timeout_seconds, lambda: reply(context, wire, answer)
    )
