"""hosted_app(): the application as a guest of another ASGI server, Ray Serve's for example.

The host has the socket and the signals: settings of address, TLS and connections have no effect. Its lifespan
events start and end the engine.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette

from engine.errors import FetchFailed, ModelError
from server import lifecycle
from server.app import build_app
from server.checks import check_config
from server.context import ServerContext
from server.logs import set_up_logging
from server.metrics import Metrics
from server.settings import Settings
from server.terminal import print_status

if TYPE_CHECKING:
    from engine import Engine

logger = logging.getLogger("monoloop.server")

LAST_EVENTS_SECONDS = 1.0


def hosted_app(settings: Settings, *, host_returns_request_id: bool = False) -> Starlette:
    """Return an application that loads its model at the lifespan's startup, and drains and stops at its
    shutdown. Raises SettingsError.

    With `host_returns_request_id`, X-Request-Id of an answer is the host's, which gives requests one, too.
    """
    set_up_logging(settings.server.log_level, settings.server.log_format)
    for warning in settings.warnings:
        logger.warning("%s", warning)
    check_config(settings.server)
    metrics = Metrics()
    traces = lifecycle.open_traces(settings.server.otlp_endpoint)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine = await load(settings, metrics)
        context.attach(engine)
        upkeep = lifecycle.begin_upkeep(engine, context, os.getpid())
        death = asyncio.create_task(end_process_when_dead(engine), name="engine death")
        try:
            yield
        finally:
            context.drain()
            await engine.drain(settings.server.drain_timeout_seconds)
            death.cancel()
            await lifecycle.end_engine(engine, upkeep, traces)

    app = build_app(None, settings.server, metrics, traces)
    context: ServerContext = app.state.context
    context.returns_request_id = not host_returns_request_id
    app.router.lifespan_context = lifespan
    return app


async def load(settings: Settings, metrics: Metrics) -> "Engine":
    """Return the engine. Raises SettingsError, FetchFailed, and prints them: a host may hide why."""
    try:
        return await lifecycle.start_engine(settings, metrics, print_status)
    except (ModelError, ValueError) as error:
        reason = error if isinstance(error, FetchFailed) else settings.explain(error)
        print_status(f"error: {reason}", logging.ERROR)
        raise reason from error


async def end_process_when_dead(engine: "Engine") -> None:
    """End the process when the engine dies, as `monoloop serve` does: its supervisor starts another."""
    await engine.wait_dead()
    logger.critical("the engine has stopped after a fault; the process ends")
    await asyncio.sleep(LAST_EVENTS_SECONDS)  # they are on their way to clients
    lifecycle.exit_now(lifecycle.ENGINE_DIED)
