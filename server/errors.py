"""The only table from exception to HTTP: status, `type` and `code` of the OpenAI error envelope.

Each API has its own envelope around the same status and message; each endpoint says which (`Envelope`).

The server's own errors, beside those that come out of the engine (`engine.errors`):

    ServerError
    ├── NotReady            the model still loads
    ├── ModelNotFound       the request names a model that is not served
    ├── Unauthorized        no API key, or a wrong one
    ├── BodyTooLarge        the body is over the limit
    ├── BodyTimeout         the body did not arrive in time
    ├── AmbiguousBody       the header gives the body's length in two ways
    ├── NoConnectionLeft    all connections that may be open are, each with a request
    ├── TooManyWatchers     as many watch the engine as may
    ├── KeyLimitReached     the API key has used up what it may
    ├── UnsupportedMedia    the body is declared to be something else than plain JSON
    ├── DeadlinePassed      the request took longer than the server allows
    └── RequestAborted      somebody has ended the request by its id
    UnsupportedField        an InvalidRequest: a known field that would change the output but does not act
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine.errors import (
    ContextLengthExceeded,
    Draining,
    EngineDead,
    EngineError,
    InvalidRequest,
    QueueFull,
    QueueTimeout,
    RequestTimeout,
    StepFailed,
    TemplateFault,
)
from server.schema.errors import (
    AnthropicError,
    AnthropicErrorDetail,
    ErrorDetail,
    ErrorResponse,
    NativeError,
    NativeErrorType,
)
from server.schema.refused_fields import UnsupportedField

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

INVALID = "invalid_request_error"
CLIENT_CLOSED_REQUEST = 499  # of no standard, but known from nginx
MAX_SHOWN_ERRORS = 3
MAX_SHOWN_INPUT = 200
MAX_COMPARED = 64  # fields that a missing one is compared with, and characters of each


class ServerError(Exception):
    """Root of the errors the server itself raises. The message is safe to show to a client."""

    param: str | None = None


class NotReady(ServerError):
    """The model is still being loaded."""


class ModelNotFound(ServerError):
    """The request names a model that is not served here."""

    param = "model"


class Unauthorized(ServerError):
    """The API key is missing or wrong."""


class BodyTooLarge(ServerError):
    """The request body is longer than `max_body_bytes`."""


class BodyTimeout(ServerError):
    """The request body did not arrive within `body_timeout_seconds`."""


class AmbiguousBody(ServerError):
    """Content-Length and Transfer-Encoding: a proxy in front may take the body's end for a new request."""

    headers: ClassVar[dict[str, str]] = {"Connection": "close"}  # as RFC 9112, section 6.3 has it


class NoConnectionLeft(ServerError):
    """All connections that the limit of open files allows are in use."""

    headers: ClassVar[dict[str, str]] = {"Connection": "close"}

    def __init__(self) -> None:
        super().__init__("All connections of this server are in use; try again in a moment.")


class TooManyWatchers(ServerError):
    """As many clients watch the engine as may."""


class KeyLimitReached(ServerError):
    """An API key has used up one of its limits for the next `retry_after_seconds`."""

    def __init__(self, limit: str, retry_after_seconds: int) -> None:
        super().__init__(f"The limit of {limit} for this API key is reached; try again later.")
        self.retry_after_seconds = retry_after_seconds


class UnsupportedMedia(ServerError):
    """The body's declared type or encoding is not plain JSON."""


class DeadlinePassed(ServerError):
    """The answer was not complete within `request_timeout_seconds`."""


class RequestAborted(ServerError):
    """The request was ended by POST /abort."""


class Fault(NamedTuple):
    """Status, type and code of an error response. `retry_after` is in seconds."""

    status: int
    type: str
    code: str | None
    retry_after: int | None = None


FAULTS: dict[type[Exception], Fault] = {
    UnsupportedField: Fault(400, INVALID, "unsupported_parameter"),
    ContextLengthExceeded: Fault(400, INVALID, "context_length_exceeded"),
    InvalidRequest: Fault(400, INVALID, None),
    AmbiguousBody: Fault(400, INVALID, None),
    Unauthorized: Fault(401, INVALID, "invalid_api_key"),
    ModelNotFound: Fault(404, INVALID, "model_not_found"),
    BodyTimeout: Fault(408, "timeout", "timeout"),
    BodyTooLarge: Fault(413, INVALID, "request_too_large"),
    UnsupportedMedia: Fault(415, INVALID, "unsupported_media_type"),
    QueueFull: Fault(429, "rate_limit_error", "slow_down", 1),
    TooManyWatchers: Fault(429, "rate_limit_error", "slow_down", 5),
    KeyLimitReached: Fault(429, "rate_limit_error", "slow_down", 1),
    # 4xx, since clients send again what ends with 5xx, 408, 409 or 429.
    RequestAborted: Fault(CLIENT_CLOSED_REQUEST, "aborted", "request_aborted"),
    TemplateFault: Fault(500, "server_error", "internal_error"),
    StepFailed: Fault(500, "server_error", "internal_error"),
    NoConnectionLeft: Fault(503, "server_error", "server_is_overloaded", 1),
    NotReady: Fault(503, "server_error", "server_is_overloaded", 5),
    Draining: Fault(503, "server_error", "server_is_shutting_down", 5),
    EngineDead: Fault(503, "server_error", "server_is_overloaded", 5),
    QueueTimeout: Fault(503, "server_error", "server_is_overloaded", 5),
    RequestTimeout: Fault(504, "server_error", "timeout"),
    DeadlinePassed: Fault(504, "server_error", "timeout"),
}
INTERNAL = Fault(500, "server_error", "internal_error")
HTTP_CODES = {404: "unknown_url", 405: "method_not_allowed"}


def fault_of(error: Exception) -> Fault:
    """Return the table's row for `error`; anything unknown is an internal error."""
    if isinstance(error, HTTPException):
        kind = INVALID if error.status_code < 500 else "server_error"
        return Fault(error.status_code, kind, HTTP_CODES.get(error.status_code))
    return next((FAULTS[kind] for kind in type(error).__mro__ if kind in FAULTS), INTERNAL)


def message_of(error: Exception) -> str:
    """Return the message for a client; internal errors never show their own text."""
    if isinstance(error, HTTPException):
        return error.detail
    if isinstance(error, EngineError | ServerError):
        return str(error)
    return "The server had an internal error while answering this request."


def envelope(error: Exception) -> ErrorResponse:
    """The OpenAI error object for `error`."""
    fault = fault_of(error)
    return ErrorResponse(
        error=ErrorDetail(
            message=message_of(error), type=fault.type, param=getattr(error, "param", None), code=fault.code
        )
    )


ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_envelope(error: Exception) -> AnthropicError:
    """The Anthropic error object for `error`. Clients find a prompt that is too long by the message."""
    fault, message = fault_of(error), message_of(error)
    if isinstance(error, ContextLengthExceeded):
        message = f"prompt is too long: {message}"
    kind = ANTHROPIC_TYPES.get(fault.status, INVALID if fault.status < 500 else "api_error")
    return AnthropicError(type="error", error=AnthropicErrorDetail(type=kind, message=message))


def native_envelope(error: Exception) -> NativeError:
    """The error object of TGI's and LightLLM's own routes."""
    status, message = fault_of(error).status, message_of(error)
    kind: NativeErrorType = "validation" if status < 500 else "generation"
    if status in (429, 503):
        kind = "overloaded"
    return NativeError(error=message, error_type=kind, message=message)


class Envelope(NamedTuple):
    """The body of an API's errors: its schema, and the function that makes it."""

    schema: type[BaseModel]
    make: Callable[[Exception], BaseModel]


OPENAI = Envelope(ErrorResponse, envelope)
ANTHROPIC = Envelope(AnthropicError, anthropic_envelope)
NATIVE = Envelope(NativeError, native_envelope)


def error_response(error: Exception, envelope: Envelope = OPENAI) -> Response:
    """Return the JSON response for `error` in an API's envelope, with the headers its status calls for."""
    fault = fault_of(error)
    headers = dict(getattr(error, "headers", None) or {})
    if fault.retry_after is not None:
        headers["Retry-After"] = str(getattr(error, "retry_after_seconds", fault.retry_after))
    if fault.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if fault.status in (408, 413):
        headers["Connection"] = "close"  # what is left of the body is not read
    return Response(
        envelope.make(error).model_dump_json(),
        status_code=fault.status,
        headers=headers,
        media_type="application/json",
    )


def invalid_request(
    error: ValidationError, body: Any, names: Mapping[str, str] | None = None
) -> InvalidRequest:
    """A short, bounded message for what the schema found in `body`; `param` names the first offending field.

    `names` are those that the client has used for fields, where they are not the field's own.

    Long inputs and long lists of errors are cut: an error must never be larger than what caused it.
    """
    lines: dict[str, str] = {}  # and the field of each
    for entry in error.errors(include_url=False, include_context=False):
        path = place_in(body, entry)
        if path and (name := (names or {}).get(str(path[0]))):
            path = (name, *path[1:])
        field = field_path(path)
        shown = ""
        if entry["type"] != "missing" and not isinstance(entry["input"], dict | list):
            shown = f" (got {entry['input']!r:.{MAX_SHOWN_INPUT}})"
        message = entry["msg"].removeprefix("Value error, ")
        if entry["type"] == "missing" and isinstance(body, dict) and len(path) == 1:
            message += like_named(field, body)
        lines[f"{field}: {message}{shown}" if field else f"{message}{shown}"] = field
    shown_lines = list(lines)[:MAX_SHOWN_ERRORS]
    if len(lines) > MAX_SHOWN_ERRORS:
        shown_lines.append(f"and {len(lines) - MAX_SHOWN_ERRORS} more")
    return InvalidRequest("; ".join(shown_lines), next(iter(lines.values())) or None)


def like_named(missing: str, body: Mapping[str, Any]) -> str:
    """Return a hint at the field of a body whose name is close to that of a missing one, "" if none is."""
    names = [name for name in [*body][:MAX_COMPARED] if len(name) <= MAX_COMPARED]
    close = difflib.get_close_matches(missing, names, n=1, cutoff=0.8)
    return f"; the body has {close[0]!r}" if close else ""


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Let an InvalidRequest name fields as the client knows them: `names` maps our fields to theirs.

    Only the first mention of each field in a message is replaced: what follows may be the client's own text.
    """
    try:
        yield
    except InvalidRequest as error:
        message = str(error)
        for ours, theirs in names.items():
            message = re.sub(rf"(?<![\w.'\"]){ours}(?![\w.\[]| ?['\"])", theirs, message, count=1)
        error.args = (message,)
        error.param = names.get(error.param or "", error.param)
        raise


def place_in(body: Any, entry: "ErrorDetails") -> tuple[int | str, ...]:
    """Return where in `body` an error is: its location without the branches of unions, which no client names.

    What is not in the body is the name of a branch, or, as the last, of a field that should be there.
    """
    path: list[int | str] = []
    for number, part in enumerate(entry["loc"], 1):
        is_last = number == len(entry["loc"])
        if is_last and entry["input"] is body and entry["type"] != "missing":
            break  # the value is wrong as this branch
        if holds(body, part):
            body = body[part]
        elif not (is_last and isinstance(body, dict)):
            continue
        path.append(part)
    return tuple(path)


def holds(value: Any, part: int | str) -> bool:
    """Check that a value has that field, or that item."""
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value


def field_path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`, each name and the whole cut to a sane length."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part[:64]}" if path else part[:64]
    return path[:MAX_SHOWN_INPUT]
