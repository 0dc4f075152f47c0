"""A request body on its way in: limits while it arrives, JSON in bounded time, the schema.

`BodyLimit` is ASGI middleware for the transport's side (size, deadline, what is never read); `read_json` is
what a route calls.
"""

import asyncio
import codecs
import re
from typing import TypeVar

import numpy as np
import orjson
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import InvalidRequest
from server.context import ServerContext, context_of
from server.errors import AmbiguousBody, BodyTooLarge, UnsupportedMedia, invalid_request
from server.schema.aliases import aliases_of, rename
from server.schema.dialects import Tables
from server.schema.refused_fields import refuse_unsupported
from server.schema.wire import WireRequest
from server.watch import STATE as WATCH
from server.watch import Watch

Model = TypeVar("Model", bound=WireRequest)

LINGER_SECONDS = 2.0

# Parsing up to 64 KiB takes 0.2 ms of text and at worst 20 ms of brackets; more goes to a thread.
OFF_LOOP_BYTES = 64 * 1024

# A parser holds the GIL to its end, thread or not, and 8 MiB of `[],[],…` took 3 s. Characters of structure,
# outside strings, are therefore counted first: these numbers take 50 ms at worst and leave room for 1,024
# prompts of token ids, or thousands of messages.
MAX_STRUCTURE = {b"[": 20_000, b"{": 20_000, b":": 50_000, b",": 500_000}
QUOTE, BACKSLASH, COLON = b'"\\:'
OPENING, CLOSING, SEPARATING = (np.frombuffer(characters, np.uint8) for characters in (b"{[", b"}]", b":,"))
STRUCTURE = np.concatenate((OPENING, CLOSING, SEPARATING))

# The text before a value that is not JSON, such as NaN, 1e999 or 007, and the name before a field's colon.
VALUE_BEGINS = re.compile(r"[:\[,]\s*[-+.\d]*\Z")
NAME = re.compile(rb'"(\w{1,64})"\s*\Z')

# `curl -d` sends a form content type. Browsers may send it to another origin without a preflight, but then
# with an Origin header.
UNNAMED_TYPES = ("", "application/x-www-form-urlencoded")


class BodyLimit:
    """Caps size and duration of request bodies.

    The server below has no cap, waits for ever for the rest of a half-sent body, and stalls the connection
    when a long body is not read to its end; so whatever is left unread is taken and dropped here.
    """

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self.app = app
        self.context = context
        self.max_bytes = context.config.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        watch: Watch = scope.setdefault("state", {}).setdefault(WATCH, Watch())
        incoming = IncomingBody(receive, self.context, watch)

        async def send_then_drain(message: Message) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if not last or incoming.is_complete:
                await send(message)
                return
            await send({**message, "more_body": True})
            await incoming.linger()
            rest = None if incoming.is_complete else asyncio.create_task(incoming.drop_rest())
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            if rest is not None:
                await rest

        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        try:
            if "content-length" in headers and "transfer-encoding" in headers:
                error = AmbiguousBody("A request has Content-Length or Transfer-Encoding, not both.")
                await self.context.error_response(error, scope)(scope, receive, send_then_drain)
            elif length.isdecimal() and int(length[:20]) > self.max_bytes:
                await self.context.error_response(incoming.too_large(), scope)(
                    scope, receive, send_then_drain
                )
            else:
                await self.app(scope, incoming.receive, send_then_drain)
        finally:
            self.context.arriving.discard(watch)
            watch.end()


class IncomingBody:
    """The body of one request: counts what arrives, by when, and remembers that the client has left.

    The transport reports a disconnect once, so whoever reads later is given it again.
    """

    def __init__(self, receive: Receive, context: ServerContext, watch: Watch) -> None:
        self._receive = receive
        self._context = context
        self._watch = watch
        self._max_bytes = context.config.max_body_bytes
        self._num_bytes = 0
        self.is_complete = False
        self._has_left = False
        context.arriving.add(watch)

    async def receive(self) -> Message:
        """The next message. Raises BodyTooLarge, BodyTimeout, Draining."""
        if self.is_complete:  # what comes now is the client's leaving, and that may take its time
            return await self._next()
        with self._watch:
            message = await self._next()
        self._num_bytes += len(message.get("body", b""))
        self.is_complete = not message.get("more_body", False)
        if self.is_complete:
            self._context.arriving.discard(self._watch)
        if self._num_bytes > self._max_bytes:
            raise self.too_large()
        return message

    async def _next(self) -> Message:
        """The transport's next message; every one after a disconnect is a disconnect."""
        if self._has_left:
            return {"type": "http.disconnect"}
        message = await self._receive()
        self._has_left = message["type"] == "http.disconnect"
        return message

    def too_large(self) -> BodyTooLarge:
        """The error for a body over the limit."""
        return BodyTooLarge(
            f"The request body is longer than the {self._max_bytes} bytes this server accepts."
        )

    async def linger(self) -> None:
        """Take and drop the rest for a moment: a close with unread data resets the connection."""
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                while not self.is_complete:
                    self.is_complete = not (await self._next()).get("more_body", False)
        except TimeoutError:
            pass

    async def drop_rest(self) -> None:
        """Take what is queued until the connection is closed: a full queue would block that for ever."""
        while (await self._next())["type"] != "http.disconnect":
            pass


async def read_json(request: Request, model: type[Model], refused: Tables) -> Model:
    """Return the request's body as a `model` that has no `refused` fields, in its turn among complete ones.

    Raises InvalidRequest, UnsupportedMedia, BodyTooLarge, BodyTimeout.
    """
    check_media(request.headers)
    body = await request.body()
    await context_of(request).arrivals.enter()
    if len(body) <= OFF_LOOP_BYTES:
        return parse(body, model, refused)
    return await asyncio.to_thread(parse, body, model, refused)


def check_media(headers: Headers) -> None:
    """Refuse what is declared to be something else than plain JSON; from a browser it must be declared.

    A charset has no meaning: JSON is UTF-8 (RFC 8259, sections 8.1 and 11).
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind in ("application/json", "text/json") or kind.endswith("+json")
    if not is_json and (kind not in UNNAMED_TYPES or "origin" in headers):
        raise UnsupportedMedia("The body must be JSON, sent as Content-Type: application/json.")
    if headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
        raise UnsupportedMedia("Compressed bodies are not supported; send the JSON as it is.")


def parse(body: bytes, model: type[Model], refused: Tables) -> Model:
    """Return the bytes of a body as a checked model. Raises InvalidRequest.

    Refused fields come before the schema: the error for `echo` with `max_tokens: 0` should name `echo`.
    orjson refuses NaN and Infinity, lone surrogates, control characters, broken UTF-8 and nesting deeper
    than 1,024; numbers it cannot hold exactly become floats, which the strict schema refuses as integers.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    check_structure(body)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        field = field_at(error.doc, error.pos)
        if field not in {*model.model_fields, *aliases_of(model), *refused[model]}:
            field = None
        place = f" at {field}" if field else ""
        raise InvalidRequest(f"The body is not valid JSON{place}: {error}", field) from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    value, renamed = rename(value, aliases_of(model))
    refuse_unsupported(value, refused[model])
    for name, nested in model.NESTED.items():
        if isinstance(inner := value.get(name), dict):
            refuse_unsupported(inner, refused[nested])
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_request(error, value, renamed) from None


def field_at(text: str, place: int) -> str | None:
    """The field of a body whose value, or a part of it, should begin at `place` or just before."""
    if not VALUE_BEGINS.search(text, max(0, place - 100), place):
        return None
    data = np.frombuffer(text[:place].encode(errors="replace"), np.uint8)
    places = np.flatnonzero(outside_strings(data) & np.isin(data, STRUCTURE))
    characters = data[places]
    depth = np.cumsum(np.isin(characters, OPENING).astype(int) - np.isin(characters, CLOSING))
    separators = places[(depth == 1) & np.isin(characters, SEPARATING)]
    if not len(separators) or data[separators[-1]] != COLON:
        return None
    name = NAME.search(data[: separators[-1]].tobytes())
    return name[1].decode() if name else None


def check_structure(body: bytes, param: str | None = None) -> None:
    """Refuse JSON with too many values to be parsed in a bounded time. Raises InvalidRequest.

    `param` names the field that holds it; None is the body itself.
    """
    if len(body) <= OFF_LOOP_BYTES or not is_dense(body):
        return
    data = np.frombuffer(body, np.uint8)
    is_outside = outside_strings(data)
    for character, limit in MAX_STRUCTURE.items():
        if np.count_nonzero(is_outside & (data == ord(character))) > limit:
            raise InvalidRequest(f"{param or 'The body'} holds too many JSON values.", param)


def is_dense(body: bytes) -> bool:
    """Check that there are more brackets, colons or commas than a request can need."""
    return any(body.count(character) > limit for character, limit in MAX_STRUCTURE.items())


def outside_strings(data: np.ndarray) -> np.ndarray:
    """Return which bytes of JSON (uint8 [n]) are outside its strings: bool [n], true for a closing quote.

    With numpy, which lets the GIL go: a regular expression held it for half a second.
    """
    quotes = np.flatnonzero(data == QUOTE)
    others = np.flatnonzero(data != BACKSLASH)
    places = np.searchsorted(others, quotes)
    num_backslashes = quotes - np.where(places > 0, others[places - 1], -1) - 1
    is_end = np.zeros(len(data), bool)
    is_end[quotes[num_backslashes % 2 == 0]] = True
    outside: np.ndarray = ~np.logical_xor.accumulate(is_end)
    return outside
