"""What every route that generates does around its own work."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.answer import Answer, while_connected
from server.body import read_json
from server.context import ServerContext, context_of
from server.schema.embeddings import EmbeddingsRequest
from server.schema.fields import Refused, unknown_fields
from server.schema.native import GenerateRequest
from server.schema.sampling import SamplingRequest

Wire = TypeVar("Wire", bound=SamplingRequest | GenerateRequest | EmbeddingsRequest)


async def answered(
    http: HttpRequest,
    schema: type[Wire],
    refused: dict[str, Refused],
    id_prefix: str,
    reply: Callable[[ServerContext, Wire, Answer], Awaitable[Response]],
) -> Response:
    """Read and check the body, begin an answer, and `reply` unless the client leaves or the time is up.

    Raises NotReady, Draining, EngineDead, what read_json() raises, ModelNotFound, ClientGone, DeadlinePassed.
    """
    context = context_of(http)
    context.check_ready()
    wire = await read_json(http, schema, refused)
    context.note_unknown_fields(unknown_fields(wire.model_extra, refused))
    answer = Answer(id_prefix, context.model_name(wire.model), context.engine.model)
    http.state.answer = answer
    return await while_connected(
        http, context.config.request_timeout_seconds, lambda: reply(context, wire, answer)
    )
