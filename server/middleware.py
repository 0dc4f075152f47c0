"""Plain ASGI middleware around all routes: request id, log line, last resort for errors; CORS; API keys."""

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import EngineError
from server.connection import is_over_limit
from server.context import ServerContext
from server.errors import CLIENT_CLOSED_REQUEST, NoConnectionLeft, ServerError, Unauthorized
from server.ids import new_id
from server.open_requests import API_KEY
from server.watch import ClientGone

logger = logging.getLogger("monoloop.access")

SLASHES = re.compile("/{2,}")
SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
ANTHROPIC_PREFIX = "/v1/messages"  # its clients look for the id under another name


class RequestScope:
    """Outermost: gives each request an id, one log line, a count and an answer whatever happens inside."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self.app = app
        self.context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = with_plain_path(origin_form(scope))
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if SANE_REQUEST_ID.fullmatch(given) else new_id()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        status = 0
        started = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                if self.context.returns_request_id:
                    headers["X-Request-Id"] = request_id
                if misspelled := scope["state"].get("misspelled_fields"):
                    hints = (f"{name} (did you mean {field}?)" for name, field in misspelled.items())
                    headers["X-Misspelled-Fields"] = ", ".join(hints)
                if scope["path"].startswith(ANTHROPIC_PREFIX):
                    headers["Request-Id"] = request_id
            await send(message)

        self.context.open_requests.begin(state)
        try:
            await self.app(scope, receive, send_with_id)
        except (ClientGone, ClientDisconnect):
            pass  # there is no client to answer to
        except Exception as error:
            logger.exception("%s failed", request_id)
            if not status:
                await self.context.error_response(error, scope)(scope, receive, send_with_id)
        finally:
            self.context.open_requests.end(state)
            self.finish(scope, request_id, status or CLIENT_CLOSED_REQUEST, time.perf_counter() - started)

    def finish(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        """Write one log line and one observation of the metrics."""
        path = scope["path"]
        is_probe = path in self.context.probes
        if not is_probe:
            self.context.metrics.http_request(scope["method"], self.context.route_of(scope), status, seconds)
        level = logging.DEBUG if is_probe else logging.INFO
        if logger.isEnabledFor(level):
            method, shown = scope["method"], path[:200].encode("unicode_escape").decode()
            fields = {"request_id": request_id, "method": method, "path": shown, "status": status}
            fields["seconds"] = round(seconds, 6)
            answer = scope["state"].get("answer")
            tokens = ""
            if answer is not None:
                fields |= answer.log_fields()
                tokens = f" {answer}" if answer.streams else ""
            line = "%s %s %s %d %.3fs%s"
            logger.log(
                level, line, request_id, method, shown, status, seconds, tokens, extra={"fields": fields}
            )


def origin_form(scope: Scope) -> Scope:
    """The scope with a target that is a whole URL, as clients of proxies send it, cut down to its path."""
    scheme, separator, rest = scope["path"].partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        return scope
    _, slash, path = rest.partition("/")
    return {**scope, "path": slash + path or "/"}


def with_plain_path(scope: Scope) -> Scope:
    """Return the scope with a path without empty parts, which come of base URLs that end in a slash."""
    path = SLASHES.sub("/", scope["path"])
    return {**scope, "path": path.removesuffix("/") or "/"}


class Cors(CORSMiddleware):
    """Starlette's, but a preflight that is refused has the body of every error."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        super().__init__(
            app,
            allow_origins=context.config.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            allow_private_network=True,  # a public page of an allowed origin may call a server at home
            expose_headers=("X-Request-Id", "Request-Id", "Retry-After", "X-Misspelled-Fields"),
        )
        self.context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            headers = Headers(scope=scope)
            if {"origin", "access-control-request-method"} <= {*headers}:
                response = self.preflight_response(headers)
                if response.status_code >= 400:
                    kept = {
                        name: text
                        for name, text in response.headers.items()
                        if "content" not in name and not name.endswith("-private-network")
                    }
                    error = HTTPException(response.status_code, f"{bytes(response.body).decode()}.", kept)
                    response = self.context.error_response(error, scope)
                await response(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


class ConnectionLimit:
    """Refuses requests on connections beyond the limit of open files, except probes."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self.app = app
        self.context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_over_limit(scope) and scope["path"] not in self.context.probes:
            await self.context.error_response(NoConnectionLeft(), scope)(scope, receive, send)
            return
        await self.app(scope, receive, send)


class ApiKeys:
    """Asks for one of the keys, as a bearer token or in x-api-key; probes and metrics stay open.

    What is guarded is decided on `scope["path"]`, which routing uses too; a URL built from the Host header
    can be made to say something else.
    """

    def __init__(
        self, app: ASGIApp, context: ServerContext, keys: Sequence[str], open_paths: Collection[str]
    ) -> None:
        self.app = app
        self.context = context
        self.open_paths = open_paths
        self.digests = [digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self.is_open(scope):
            headers = Headers(scope=scope)
            scheme, _, token = headers.get("authorization", "").partition(" ")
            sent = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
            index = self.index_of(sent)
            if index is None:
                message = (
                    "The API key is wrong." if sent else "An API key is needed: Authorization: Bearer <key>."
                )
                await self.context.error_response(Unauthorized(message), scope)(scope, receive, send)
                return
            scope["state"][API_KEY] = index
        await self.app(scope, receive, send)

    def is_open(self, scope: Scope) -> bool:
        """Check that a request needs no key: it reads an open path, where other methods may do more, or asks
        which methods there are."""
        method = scope["method"]
        return method == "OPTIONS" or (method in ("GET", "HEAD") and scope["path"] in self.open_paths)

    def index_of(self, key: str) -> int | None:
        """Return which key this is, None if it is none of them, in a time that does not depend on any."""
        sent = digest(key.encode("latin1"))  # the bytes of the header
        matches = [hmac.compare_digest(sent, known) for known in self.digests]
        return matches.index(True) if any(matches) else None


class RaisedErrors:
    """Innermost: answers the errors that are raised on purpose, before an answer has begun."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self.app = app
        self.context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except (EngineError, ServerError) as error:
            await self.context.error_response(error, scope)(scope, receive, send)
        except HTTPException as error:
            await self.routing_response(error, scope)(scope, receive, send)

    def routing_response(self, error: HTTPException, scope: Scope) -> Response:
        """Return the response for an unknown path, a wrong method, or OPTIONS, which is not an error."""
        path, method = scope["path"][:200], scope["method"]
        if error.status_code == 405:
            allowed = ", ".join(
                sorted({*(error.headers or {}).get("Allow", "").split(", "), "OPTIONS"} - {""})
            )
            if method == "OPTIONS":
                return Response(status_code=204, headers={"Allow": allowed})
            detail = f"{method} is not allowed for {path}; allowed is {allowed}."
            error = HTTPException(405, detail, {"Allow": allowed})
        elif error.status_code == 404:
            error = HTTPException(404, f"There is nothing at {path}; see /docs for what there is.")
        return self.context.error_response(error, scope)


def digest(key: bytes) -> bytes:
    """SHA-256 of a key: one length for all, and no key is kept."""
    return hashlib.sha256(key).digest()
