"""hypercorn's connections: closed as soon as their client closes them, and no more than may be open.

Every connection is a file descriptor, and a process has a limited number. Near that limit, connections
without a request are closed, the longest idle first; if all have one, requests on further connections get 503
(probes are answered), from descriptors that are kept in reserve for it.
"""

import asyncio
import logging
from typing import Any

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Event, Updated
from hypercorn.typing import ASGIFramework
from starlette.types import Scope

from server.file_limit import file_limit

logger = logging.getLogger("monoloop.server")

RESERVED_FILES = 64
# A new connection that has sent nothing for this long may be closed like one that waits for its next request.
FRESH_SECONDS = 1.0
LOG_EVERY_SECONDS = 60.0
IS_OVER_LIMIT = "is_over_connection_limit"  # in the scope's state, for the application to refuse


class Connections:
    """Takes connections from a listening socket and serves an application on them."""

    def __init__(self, app: ASGIFramework, config: Config) -> None:
        self._app = ASGIWrapper(app)
        self._config = config
        self._context = WorkerContext(None)
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[Connection] = set()  # without those that are being closed
        self._capacity = file_limit()  # how many may be open; learned when the reserve is reached
        self._waiting: dict[Connection, float] = {}  # without a request, since when; the oldest first
        self._logged_at = -LOG_EVERY_SECONDS

    async def serve(self, listener: Any, backlog: int, ended: asyncio.Event) -> None:
        """Serve until `ended` is set; then close idle connections, and busy ones after `graceful_timeout`."""
        server = await asyncio.start_server(self._accept, sock=listener, backlog=backlog)
        try:
            await ended.wait()
            server.close()
            await self._context.terminated.set()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=self._config.graceful_timeout)
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def note_idle(self, connection: "Connection", *, is_idle: bool) -> None:
        """Note that a connection has no request, or has one again."""
        self._waiting.pop(connection, None)
        if is_idle:
            self._waiting[connection] = connection.loop.time()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a new connection if files are left."""
        number, limit = writer.get_extra_info("socket").fileno(), file_limit()
        reserved = min(RESERVED_FILES, limit // 4)
        if number >= limit - reserved:  # the lowest number that was free: all below it are in use
            self._capacity = min(self._capacity, len(self._open))
        elif len(self._open) < self._capacity // 2:
            self._capacity = limit  # forget it: what else is open may have changed
        is_over_limit = False
        if len(self._open) >= self._capacity:
            self._log(limit)
            is_over_limit = not self._close_one()
        if is_over_limit and number >= limit - reserved // 2:
            writer.transport.abort()
            return
        connection = Connection(self, self._app, self._config, self._context, reader, writer, is_over_limit)
        self._open.add(connection)
        task = asyncio.get_running_loop().create_task(connection.run(), name="connection")
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._end(connection, task))

    def _close_one(self) -> bool:
        """Close the connection that has been without a request for longest; return False if there is none."""
        now = asyncio.get_running_loop().time()
        for connection, since in self._waiting.items():
            if connection.has_been_used or now - since >= FRESH_SECONDS:
                del self._waiting[connection]
                self._open.discard(connection)
                connection.writer.close()
                return True
        return False

    def _end(self, connection: "Connection", task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._open.discard(connection)
        self._waiting.pop(connection, None)
        connection.writer.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a connection failed", "exception": error}
            )

    def _log(self, limit: int) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= LOG_EVERY_SECONDS:
            self._logged_at = now
            logger.warning(
                "nearly all of the %d files that may be open (ulimit -n) are open, with %d connections: "
                "idle connections are closed, and if there are none, new ones are refused",
                limit,
                len(self._open),
            )


class Connection(TCPServer):  # type: ignore[misc]  # its package is not checked
    """One connection. hypercorn's stays open for the keep-alive time after its client has closed it."""

    def __init__(
        self,
        connections: Connections,
        app: ASGIWrapper,
        config: Config,
        context: WorkerContext,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        is_over_limit: bool,
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(app, loop, config, context, {IS_OVER_LIMIT: is_over_limit}, reader, writer)
        self.has_been_used = False
        self._connections = connections
        self._has_ended = False
        connections.note_idle(self, is_idle=True)

    async def protocol_send(self, event: Event) -> None:
        """Act on an event of the protocol; after the end of what is read, no timer is started any more."""
        if isinstance(event, Updated):
            if self._has_ended:
                return
            self.has_been_used = True
            self._connections.note_idle(self, is_idle=event.idle)
        await super().protocol_send(event)

    async def _read_data(self) -> None:
        await super()._read_data()
        self._has_ended = True
        self._connections.note_idle(self, is_idle=False)
        await self.idle_task.stop()


def is_over_limit(scope: Scope) -> bool:
    """Check that a request came on a connection for which there was no room."""
    return bool(scope.get("state", {}).get(IS_OVER_LIMIT))
