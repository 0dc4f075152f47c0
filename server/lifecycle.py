"""From settings to a running server, and to its end: loading, signals, drain, death of the engine.

    bind ── load ── serve ── SIGTERM, Ctrl-C ── drain ── stop        exit code 0
              │       └───── engine died or stuck ───── stop         exit code 1
              ├───────────── no download ───────────── stop         exit code 1
              └───────────── wrong setting ─────────── stop         exit code 2

The port is bound and answered from the first moment: /health says 200, everything else 503 until the model
is there. hypercorn gets no signals, and its own serve() is not used: it cuts streams at a signal, or, on
Python 3.12, never returns.
"""

import asyncio
import faulthandler
import gc
import json
import logging
import os
import shlex
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hypercorn.config import Config as HypercornConfig
from starlette.applications import Starlette

from engine.errors import FetchFailed, ModelError
from server.app import build_app
from server.checks import check_config
from server.config import ServerConfig
from server.connections import CUT_SECONDS, Connections
from server.context import ServerContext
from server.file_limit import raise_file_limit
from server.flags import SettingsError, flag
from server.garbage import IdleCollector, collect_rarely
from server.listener import certificate_problem, listen, remove, tls_context, url_of
from server.logs import set_up_logging
from server.metrics import Metrics
from server.metrics_push import MetricsPush
from server.settings import Settings
from server.terminal import print_status
from server.throughput import ThroughputLog

if TYPE_CHECKING:
    from engine import Engine
    from server.tracing import Traces

logger = logging.getLogger("monoloop.server")

STARTUP_FAILED = 1
ENGINE_DIED = 1

# Time for what is not the answers' own: flushing last events, closing connections, joining threads.
FLUSH_SECONDS = 5.0
STOP_SECONDS = 10.0
# A Ctrl-C reaches every process of a terminal, and make or a supervisor may pass it on: that is one signal.
ONE_SIGNAL_SECONDS = 0.5
HTTP2_STREAMS = 4096
# Of the model's sampling defaults, those that the example request shows.
SHOWN_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def run(settings: Settings) -> int:
    """Serve until a signal or a fault; return the exit code. Raises SettingsError."""
    set_up_logging(settings.server.log_level, settings.server.log_format)
    faulthandler.enable()  # a crash of a library shows where it was
    for warning in settings.warnings:
        logger.warning("%s", warning)
    warn_if_open(settings.server)
    raise_file_limit()
    tls = tls_context(settings.server)
    if tls and (problem := certificate_problem(tls, settings.server)):
        logger.warning("%s", problem)
    check_config(settings.server)
    traces = open_traces(settings.server.otlp_endpoint)
    listener = listen(settings.server)
    with asyncio.Runner(loop_factory=loop_factory(settings.server)) as runner:
        code = runner.run(Server(settings, listener, tls, traces).run())
        if not runner.run(tasks_end()):  # the runner would wait for them
            exit_now(code)
    gc.unfreeze()  # or libraries that count their objects at exit report leaks
    if not threads_end():  # the interpreter would wait for them
        exit_now(code)
    return code


class Server:
    """One run: the HTTP side, the engine, and who ends what."""

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        tls: ssl.SSLContext | None = None,
        traces: "Traces | None" = None,
    ) -> None:
        self.settings = settings
        self.listener = listener
        self.tls = tls
        self.traces = traces
        self.url = url_of(listener, settings.server)
        self.stop_requested = asyncio.Event()
        self.http_may_end = asyncio.Event()
        self.first_signal_at = 0.0
        self.has_shown_url = False

    async def run(self) -> int:
        """Load, serve, drain, stop."""
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(log_loop_exception)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.on_signal, number)
        metrics = Metrics()
        app = build_app(None, self.settings.server, metrics, self.traces)
        context: ServerContext = app.state.context
        http = asyncio.create_task(self.serve_http(app), name="http")
        stop = asyncio.create_task(self.stop_requested.wait(), name="stop requested")
        try:
            engine = await self.load(metrics, stop, http)
            if engine is None:
                return STARTUP_FAILED
            context.attach(engine)
            self.announce(context, time.perf_counter() - started)
            return await self.serve_until_the_end(engine, context, stop, http)
        finally:
            await self.end_http(http)
            stop.cancel()

    async def load(
        self, metrics: Metrics, stop: "asyncio.Task[Any]", http: "asyncio.Task[None]"
    ) -> "Engine | None":
        """The engine, or None if its model could not be fetched. A signal meanwhile ends the process at once.

        Raises SettingsError.
        """
        print_status(f"loading {self.settings.engine.model}")
        loading = asyncio.create_task(start_engine(self.settings, metrics, self.report), name="load")
        await asyncio.wait((loading, stop, http), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            if http.done():
                http.result()
            self.exit_now(0)  # threads that load weights cannot be stopped
        try:
            return loading.result()
        except FetchFailed as error:
            print_status(f"error: {error}", logging.ERROR)
            return None
        except (ModelError, ValueError) as error:  # a setting that cannot be met
            raise self.settings.explain(error) from error

    def report(self, progress: str) -> None:
        """Print a line about loading, the first of them (the model is found) with the address."""
        if not self.has_shown_url:
            progress += f"; until it is loaded, {self.url} answers 503"
            self.has_shown_url = True
        print_status(progress)

    def announce(self, context: ServerContext, seconds: float) -> None:
        """Print the address and an example request."""
        key = ' -H "Authorization: Bearer $MONOLOOP_API_KEY"' if self.settings.server.api_key else ""
        defaults = context.engine.model.generation_defaults
        sampling = {name: defaults[name] for name in SHOWN_SAMPLING if name in defaults}
        request = {"messages": [{"role": "user", "content": "Hello!"}], **sampling, "stream": True}
        body = json.dumps(request)
        print_status(f"{context.model_names[0]} is ready after {seconds:.1f} s: {self.url}")
        if not (context.engine.model.is_embedding_model or context.engine.model.num_labels):
            logger.info(
                "%s is not an embedding model: vectors of /v1/embeddings are poor for search",
                context.model_names[0],
            )
        url = f"{curl_url(self.url)}/v1/chat/completions"
        print_status(f"  curl -N {url}{key} -H 'Content-Type: application/json' -d '{body}'")

    async def serve_until_the_end(
        self, engine: "Engine", context: ServerContext, stop: "asyncio.Task[Any]", http: "asyncio.Task[None]"
    ) -> int:
        """Wait for a signal or a death, then end everything in order."""
        death = asyncio.create_task(engine.wait_dead(), name="engine death")
        port = None if self.settings.server.uds else self.listener.getsockname()[1]
        upkeep = begin_upkeep(engine, context, port)
        await asyncio.wait((stop, death, http), return_when=asyncio.FIRST_COMPLETED)
        died = not engine.is_alive or http.done()
        context.drain()
        if http.done():
            logger.critical("the HTTP side has stopped after a fault", exc_info=http.exception())
        elif died:
            logger.critical("the engine has stopped after a fault; the server ends")
        else:
            limit = self.settings.server.drain_timeout_seconds
            print_status(f"finishing what runs, for up to {limit:g} s; once more to end at once")
            await engine.drain(limit)
        await self.end_http(http)
        death.cancel()
        has_stopped = await end_engine(engine, upkeep, self.traces)
        if died or not has_stopped:  # a thread that is stuck would hold the interpreter up, or crash it
            self.exit_now(ENGINE_DIED)
        return 0

    async def serve_http(self, app: Starlette) -> None:
        """Serve HTTP with hypercorn on the bound socket, until `http_may_end`."""
        config = HypercornConfig()
        config.keep_alive_timeout = self.settings.server.keep_alive_seconds
        config.keep_alive_max_requests = 2**31
        config.h2_max_concurrent_streams = HTTP2_STREAMS
        config.graceful_timeout = FLUSH_SECONDS
        config.include_server_header = False
        config.accesslog = None
        config.errorlog = logging.getLogger("monoloop.hypercorn")
        config.errorlog.setLevel(logging.WARNING)
        connections = Connections(app, config, self.settings.server.send_timeout_seconds, self.tls)
        await connections.serve(self.listener, self.http_may_end)

    async def end_http(self, http: "asyncio.Task[None]") -> None:
        """Close all connections; those still open after FLUSH_SECONDS are cut."""
        remove(self.listener)
        self.http_may_end.set()
        await asyncio.wait([http], timeout=FLUSH_SECONDS + CUT_SECONDS)
        if not http.done():
            logger.warning("connections were still open and are cut")
            http.cancel()
            await asyncio.wait([http], timeout=FLUSH_SECONDS)

    def on_signal(self, number: int) -> None:
        """Drain at the first signal, end at once at the second."""
        now = time.monotonic()
        if not self.stop_requested.is_set():
            self.first_signal_at = now
            self.stop_requested.set()
        elif now - self.first_signal_at > ONE_SIGNAL_SECONDS:
            print_status("ending at once")
            self.exit_now(128 + number)

    def exit_now(self, code: int) -> None:
        """End the process now; a unix socket's file goes with it."""
        remove(self.listener)
        exit_now(code)


async def start_engine(settings: Settings, metrics: Metrics, on_progress: Callable[[str], None]) -> "Engine":
    """Import and start the engine. Raises ModelError, ValueError."""
    gc.disable()  # start-up only adds objects: walking them again and again takes 0.3 s
    try:
        from engine import Engine

        engine = await Engine.start(settings.engine, observer=metrics, on_progress=on_progress)
        collect_rarely()
        return engine
    finally:
        gc.enable()


def begin_upkeep(engine: "Engine", context: ServerContext, number: int | None) -> "list[asyncio.Task[None]]":
    """Begin what runs beside an engine: its log line, garbage collection, and the push of its metrics if one
    is set, as those of `number` on this host."""
    work = [ThroughputLog(engine.stats).run(), IdleCollector(context.open_requests.is_empty).run()]
    config = context.config
    if config.metrics_push_url is not None:
        push = MetricsPush(context.metrics, config.metrics_push_url, config.metrics_push_job, number)
        work.append(push.run(config.metrics_push_seconds))
    return [asyncio.create_task(task, name="upkeep") for task in work]


async def end_engine(engine: "Engine", upkeep: "list[asyncio.Task[None]]", traces: "Traces | None") -> bool:
    """Stop the engine and what runs beside it; return True if it was alive and stopped in time."""
    stopped = engine.is_alive
    try:
        await asyncio.wait_for(engine.stop(), STOP_SECONDS)
    except TimeoutError:
        logger.error("the engine did not stop in time")
        stopped = False
    for task in upkeep:
        task.cancel()
    await asyncio.wait(upkeep, timeout=FLUSH_SECONDS)  # for the metrics that are pushed at the end
    if traces is not None:
        await traces.close(FLUSH_SECONDS)
    return stopped


def open_traces(endpoint: str | None) -> "Traces | None":
    """Return the traces that go to an OpenTelemetry collector, if one is set. Raises SettingsError."""
    if endpoint is None:
        return None
    try:
        from server.tracing import Traces
    except ImportError as error:
        install = "in monoloop's folder, pip install '.[otel]'"
        raise SettingsError(
            f"{flag('otlp_endpoint')}: OpenTelemetry is not installed ({error}); {install}"
        ) from None
    return Traces.to_collector(endpoint)


def curl_url(url: str) -> str:
    """Return curl's arguments for the address of a server."""
    path = url.removeprefix("unix:")
    return url if path == url else f"--unix-socket {shlex.quote(path)} http://localhost"


def warn_if_open(config: ServerConfig) -> None:
    """Warn if anyone who reaches the port may use the model."""
    if config.uds or config.api_key or config.host in ("localhost", "::1") or config.host.startswith("127."):
        return
    logger.warning(
        "listening on %s WITHOUT an API key: everybody who can reach this machine can use the model. "
        "Set MONOLOOP_API_KEY, or --host 127.0.0.1.",
        config.host,
    )


def loop_factory(config: ServerConfig) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory; None, for asyncio's own loop, if the setting is off or there is no uvloop."""
    if not config.uvloop:
        return None
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def log_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error that no task awaits, such as a broken protocol: one line, the rest at debug level."""
    error = context.get("exception")
    logger.warning("%s: %s", context.get("message"), f"{error!r:.300}")
    logger.debug("in full", exc_info=error)


async def tasks_end(seconds: float = FLUSH_SECONDS) -> bool:
    """Cancel all other tasks; return True if they end in time."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        _, others = await asyncio.wait(others, timeout=seconds)
    if others:
        logger.error("%d tasks did not end: %.300s", len(others), others)
    return not others


def threads_end(seconds: float = FLUSH_SECONDS) -> bool:
    """Return True if all other threads end in time; one may still compile for a client that has left."""
    deadline = time.monotonic() + seconds
    others = [
        thread
        for thread in threading.enumerate()
        if thread is not threading.current_thread() and not thread.daemon
    ]
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in others)


def exit_now(code: int) -> None:
    """End the process now, threads or no threads."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
