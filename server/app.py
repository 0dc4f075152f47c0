"""build_app(): routes, middleware and the exception table become one Starlette application."""

from typing import TYPE_CHECKING

import orjson
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from server.body import BodyLimit
from server.config import ServerConfig
from server.context import ServerContext
from server.endpoint import EndpointApp
from server.key_limits import Allowance, KeyLimits
from server.metrics import Metrics
from server.middleware import ApiKeys, ConnectionLimit, Cors, RaisedErrors, RequestScope
from server.openapi import document
from server.routes import page
from server.routes.table import ENDPOINTS, REFUSED, open_paths

if TYPE_CHECKING:
    from engine import Engine
    from server.tracing import Traces


class Application(Starlette):
    """Starlette without its own two layers around ours, which catch exceptions as ours do."""

    def build_middleware_stack(self) -> ASGIApp:
        """The router in our layers."""
        app: ASGIApp = self.router
        for layer, args, kwargs in reversed(self.user_middleware):
            app = layer(app, *args, **kwargs)
        return app


def build_app(
    engine: "Engine | None",
    config: ServerConfig,
    metrics: Metrics | None = None,
    traces: "Traces | None" = None,
) -> Starlette:
    """The application around `engine`, or around none yet: `app.state.context.attach()` brings it later.

    `metrics` is the observer the engine was (or will be) started with.
    """
    context = ServerContext(config, metrics or Metrics())
    if engine is not None:
        context.attach(engine)
    apps = [EndpointApp(endpoint) for endpoint in ENDPOINTS]
    application = Application(
        routes=[
            *(Route(path, app, methods=[app.endpoint.method]) for app in apps for path in app.endpoint.paths),
            Route("/openapi.json", openapi, methods=["GET"]),
            *page.ROUTES,
        ],
        middleware=middleware(context, traces),
    )
    application.router.redirect_slashes = False  # a redirect would be built from the Host header
    application.state.context = context
    context.route_templates = {app: app.endpoint.paths[0] for app in apps}
    context.envelopes = {path: endpoint.envelope for endpoint in ENDPOINTS for path in endpoint.paths}
    context.probes = {path for endpoint in ENDPOINTS if endpoint.is_probe for path in endpoint.paths}
    context.refused = REFUSED
    return application


def middleware(context: ServerContext, traces: "Traces | None") -> list[Middleware]:
    """From the outermost inwards."""
    config = context.config
    layers = [Middleware(RequestScope, context=context)]
    if traces is not None:
        layers.append(Middleware(traces.around, context=context))
    if config.cors_origins:
        layers.append(Middleware(Cors, context=context))
    layers += [Middleware(BodyLimit, context=context), Middleware(ConnectionLimit, context=context)]
    if config.api_key:
        keys = [key.get_secret_value() for key in config.api_key]
        opened = open_paths(config.open_paths)
        layers.append(Middleware(ApiKeys, context=context, keys=keys, open_paths=opened))
    if any((config.key_requests, config.key_requests_per_minute, config.key_tokens_per_minute)):
        allowances = [Allowance(config) for _ in config.api_key or (None,)]
        paths = {path for endpoint in ENDPOINTS if endpoint.request is not None for path in endpoint.paths}
        layers.append(Middleware(KeyLimits, context=context, allowances=allowances, paths=paths))
    layers.append(Middleware(RaisedErrors, context=context))
    return layers


async def openapi(http: Request) -> Response:
    """The description of this API."""
    return Response(orjson.dumps(document()), media_type="application/json")
