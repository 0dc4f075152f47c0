"""An endpoint as data, and what every endpoint with a body does around its own work."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.answer import Answer, abort_all
from server.body import read_json
from server.context import ServerContext, context_of
from server.errors import OPENAI, Envelope
from server.schema.wire import ModelRequest
from server.watch import watch_of

Body = TypeVar("Body", bound=ModelRequest)

GIVEN_IDS = ("request_id", "rid", "group_request_id")


class Endpoint(NamedTuple):
    """One handler at one path or several, the first of which names it in metrics.

    `response` None is an empty or a text body; `chunk` is one event of the stream; `envelope` says how errors
    are written; `example` is a request that is answered. A probe is asked every few seconds by machines: it
    is logged at debug level only, and not part of the HTTP metrics. An open endpoint needs no API key.
    """

    method: str
    paths: tuple[str, ...]
    handler: Callable[[HttpRequest], Awaitable[Response]]
    response: type[BaseModel] | None = None
    request: type[ModelRequest] | None = None
    chunk: type[BaseModel] | None = None
    envelope: Envelope = OPENAI
    example: Mapping[str, Any] | None = None
    is_probe: bool = False
    is_open: bool = False


class EndpointApp:
    """An endpoint as an ASGI application."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self.endpoint.handler(HttpRequest(scope, receive, send))
        await response(scope, receive, send)


async def read_request(http: HttpRequest, schema: type[Body]) -> tuple[Body, str]:
    """Return the checked body, and the name of the model to answer with.

    Raises NotReady, what read_json() raises, ModelNotFound.
    """
    context = context_of(http)
    body = await read_json(http, schema, context.refused)
    http.state.given_ids = given_ids(body)
    misspelled = context.note_unknown_fields(schema, body.model_extra)
    for name, nested in schema.NESTED.items():
        misspelled |= context.note_unknown_fields(nested, getattr(body, name).model_extra)
    if misspelled:
        http.state.misspelled_fields = misspelled
    return body, context.model_name(body.model)


async def run_plain(
    http: HttpRequest, schema: type[Body], reply: Callable[[ServerContext, Body], Awaitable[Response]]
) -> Response:
    """Read the body of a request that generates nothing, and `reply` unless the client leaves meanwhile.

    Raises what read_request() raises, ClientGone, DeadlinePassed.
    """
    context = context_of(http)
    body, _ = await read_request(http, schema)
    watch = watch_of(http)
    watch.begin(http.receive, context.config.request_timeout_seconds)
    with watch:
        return await reply(context, body)


def given_ids(body: ModelRequest) -> set[str]:
    """Return the ids that a body gives its request, in the words of vLLM, SGLang and LightLLM."""
    extra = body.model_extra or {}
    return {str(extra[name]) for name in GIVEN_IDS if isinstance(extra.get(name), str | int)}


async def run_generation(
    http: HttpRequest,
    schema: type[Body],
    id_prefix: str,
    reply: Callable[[ServerContext, Body, Answer], Awaitable[Response]],
) -> Response:
    """Read the body, begin an answer, and `reply` unless the client leaves or the time is up.

    Raises Draining, EngineDead, what read_request() raises, ClientGone, DeadlinePassed.
    """
    context = context_of(http)
    context.check_ready()
    body, name = await read_request(http, schema)
    answer = Answer(id_prefix, name, context.engine.model)
    http.state.answer = answer
    watch = watch_of(http)
    watch.begin(http.receive, context.config.request_timeout_seconds)
    try:
        with watch:
            return await reply(context, body, answer)
    except BaseException as error:
        abort_all(answer.streams)
        answer.note_error(error)
        raise
