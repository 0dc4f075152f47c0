"""build_app(): routes, middleware and the exception table become one Starlette application."""

from typing import TYPE_CHECKING

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.errors import EngineError
from server.body import BodyLimit
from server.context import ServerContext, context_of
from server.errors import ServerError
from server.metrics import Metrics
from server.middleware import ApiKeys, ConnectionLimit, Cors, RequestScope
from server.openapi import document
from server.routes import docs
from server.routes.table import ENDPOINTS, REFUSED, open_paths
from server.settings import ServerConfig

if TYPE_CHECKING:
    from engine import Engine


def build_app(engine: "Engine | None", config: ServerConfig, metrics: Metrics | None = None) -> Starlette:
    """The application around `engine`, or around none yet: `app.state.context.attach()` brings it later.

    `metrics` is the observer the engine was (or will be) started with.
    """
    context = ServerContext(config, metrics or Metrics())
    if engine is not None:
        context.attach(engine)
    app = Starlette(
        routes=[
            *(
                Route(path, endpoint.handler, methods=[endpoint.method])
                for endpoint in ENDPOINTS
                for path in endpoint.paths
            ),
            Route("/openapi.json", openapi, methods=["GET"]),
            Route("/docs", docs.docs, methods=["GET"]),
            Route("/", docs.root, methods=["GET"]),
        ],
        middleware=middleware(context),
        exception_handlers={
            EngineError: on_error,
            ServerError: on_error,
            HTTPException: on_http_exception,
        },
    )
    app.router.redirect_slashes = False  # a redirect would be built from the Host header
    app.state.context = context
    context.route_templates = {endpoint.handler: endpoint.paths[0] for endpoint in ENDPOINTS}
    context.envelopes = {path: endpoint.envelope for endpoint in ENDPOINTS for path in endpoint.paths}
    context.probes = {path for endpoint in ENDPOINTS if endpoint.is_probe for path in endpoint.paths}
    context.refused = REFUSED
    return app


def middleware(context: ServerContext) -> list[Middleware]:
    """From the outermost inwards."""
    config = context.config
    layers = [Middleware(RequestScope, context=context)]
    if config.cors_origins:
        layers.append(Middleware(Cors, context=context))
    layers += [Middleware(BodyLimit, context=context), Middleware(ConnectionLimit, context=context)]
    if config.api_key:
        keys = [key.get_secret_value() for key in config.api_key]
        layers.append(Middleware(ApiKeys, context=context, keys=keys, open_paths=open_paths()))
    return layers


async def openapi(http: Request) -> Response:
    """The description of this API."""
    return Response(orjson.dumps(document()), media_type="application/json")


async def on_error(http: Request, error: Exception) -> Response:
    """Errors that were raised on purpose."""
    return context_of(http).error_response(error, http.scope)


async def on_http_exception(http: Request, error: Exception) -> Response:
    """Return the response for an unknown path, a wrong method, or OPTIONS, which is not an error."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = ", ".join(sorted({*(error.headers or {}).get("Allow", "").split(", "), "OPTIONS"} - {""}))
        if http.method == "OPTIONS":
            return Response(status_code=204, headers={"Allow": allowed})
        detail = f"{http.method} is not allowed for {http.scope['path'][:200]}; allowed is {allowed}."
        error = HTTPException(405, detail, {"Allow": allowed})
    elif error.status_code == 404:
        error = HTTPException(
            404, f"There is nothing at {http.scope['path'][:200]}; see /docs for what there is."
        )
    return context_of(http).error_response(error, http.scope)
