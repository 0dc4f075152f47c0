"""The connections of a server: no more than may be open, none whose client has stopped reading.

Every connection is a file descriptor, and a process has a limited number. Near that limit, connections
without a request are closed, the longest idle first; if all have one, requests on further connections get 503
(probes are answered), from descriptors that are kept in reserve for it. Once half of those are in use, every
further connection gets 503 at once.
"""

import asyncio
import logging
import socket
import ssl
from contextlib import suppress

from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from starlette.types import ASGIApp

from server.arrivals import ArrivalLimiter
from server.connection import Connection
from server.deadlines import Deadlines
from server.errors import NoConnectionLeft, error_response
from server.file_limit import file_limit
from server.watch import SlowClient

logger = logging.getLogger("monoloop.server")

RESERVED_FILES = 64
# A new connection that has sent nothing for this long may be closed like one that waits for its next request.
FRESH_SECONDS = 1.0
LOG_EVERY_SECONDS = 60.0
# Each costs the loop 0.3 ms: hundreds in one turn would stop all streams. Others wait in the listen queue.
ACCEPTS_PER_TURN = 4
RETRY_ACCEPT_SECONDS = 1.0
MAX_REFUSED_BYTES = 2**20
CUT_SECONDS = 2.0  # for requests that are cancelled, to end
HANDSHAKE_SECONDS = 10.0


class Connections:
    """Takes connections from a listening socket and serves an application on them."""

    def __init__(
        self,
        app: ASGIApp,
        config: Config,
        send_timeout_seconds: float = 60,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.app = app
        self.config = config
        self.context = WorkerContext(None)
        self.arrivals = ArrivalLimiter()
        self.send_timeout_seconds = send_timeout_seconds
        self._tls = tls
        self._refusal = refusal()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[Connection] = set()  # without those that are closed for others
        self._capacity = file_limit()  # how many may be open; learned when the reserve is reached
        # Those without a request.
        self._waiting: Deadlines[Connection] = Deadlines(config.keep_alive_timeout, Connection.close)
        self._unflushed: list[Connection] = []
        self._written: set[Connection] = set()  # since their clients were last seen to have read everything
        self._timer: asyncio.TimerHandle | None = None
        self._logged_at = -LOG_EVERY_SECONDS

    async def serve(self, listener: socket.socket, ended: asyncio.Event) -> None:
        """Serve until `ended` is set; then close idle connections, and busy ones after `graceful_timeout`."""
        listener.setblocking(False)
        self._listen(listener)
        try:
            await ended.wait()
            self._stop_listening(listener)
            await self.context.terminated.set()
            for connection in self._waiting.clear():
                connection.close()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=self.config.graceful_timeout)
        finally:
            self._stop_listening(listener)
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=CUT_SECONDS)

    def _listen(self, listener: socket.socket) -> None:
        if listener.fileno() != -1:  # it has not been closed meanwhile
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    def _stop_listening(self, listener: socket.socket) -> None:
        if listener.fileno() != -1:
            asyncio.get_running_loop().remove_reader(listener.fileno())
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        """Take the next connections from the listen queue."""
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTS_PER_TURN):
            try:
                client, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:  # by the client, while it waited
                continue
            except (
                OSError
            ) as error:  # no more files or memory: the listener stays ready, so look away from it
                logger.warning("cannot accept connections: %s", error)
                loop.remove_reader(listener.fileno())
                loop.call_later(RETRY_ACCEPT_SECONDS, self._listen, listener)
                return
            client.setblocking(False)
            task = loop.create_task(self._serve(client), name="connection")
            self._tasks.add(task)
            task.add_done_callback(self._end)

    def note_idle(self, connection: Connection, *, is_idle: bool) -> None:
        """Note that a connection has no request, or has one again."""
        if not is_idle:
            self._waiting.discard(connection)
        elif self.context.terminated.is_set():
            connection.close()
        else:
            self._waiting.add(connection)

    def flush_soon(self, connection: Connection) -> None:
        """Flush a connection after this turn of the loop, together with others.

        A send that need not wake its client, since it still reads what came before, costs 8 µs instead of 20.
        """
        if not self._unflushed:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unflushed.append(connection)

    def _flush(self) -> None:
        connections, self._unflushed = self._unflushed, []
        for connection in connections:
            connection.flush()
        self._written.update(connections)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is None and self._written:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.send_timeout_seconds / 4, self._cut_slow_ones)

    def _cut_slow_ones(self) -> None:
        """Cut the connections whose clients have stopped reading."""
        self._timer = None
        oldest = asyncio.get_running_loop().time() - self.send_timeout_seconds
        self._written = {connection for connection in self._written if connection.is_slow}
        for connection in self._written:
            if connection.last_read_at() <= oldest:
                logger.info("a client stopped reading; its connection is cut")
                connection.cut(SlowClient())
        self._set_timer()

    async def _serve(self, client: socket.socket) -> None:
        """Serve a new connection if files are left."""
        number, limit = client.fileno(), file_limit()
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
            self._refuse(client)
            return
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                client,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if self._tls else None,
            )
        except OSError:  # the client has left, or speaks no TLS
            client.close()
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        connection = Connection(self, reader, writer, is_over_limit)
        self._open.add(connection)
        try:
            await connection.run()
            await connection.closed()
        finally:
            self._open.discard(connection)
            self._waiting.discard(connection)
            self._written.discard(connection)
            connection.cut()

    def _refuse(self, client: socket.socket) -> None:
        """Answer with 503, whatever the request may be (over TLS with nothing), and close the connection."""
        with client, suppress(OSError):
            if self._tls is None:
                client.send(self._refusal)
                client.recv(MAX_REFUSED_BYTES)  # what is unread when a connection closes resets it

    def _close_one(self) -> bool:
        """Close the connection that has been without a request for longest; return False if there is none."""
        now = asyncio.get_running_loop().time()
        for connection, since in self._waiting.items():
            is_old = connection.has_been_used or now - since >= FRESH_SECONDS
            if is_old and not connection.is_slow:  # or it would stay open
                self._waiting.discard(connection)
                self._open.discard(connection)
                connection.close()
                return True
        return False

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
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


def refusal() -> bytes:
    """Return a whole response of HTTP/1.1, for a connection that there is no room to serve."""
    response = error_response(NoConnectionLeft())
    headers = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
    return b"HTTP/1.1 %d \r\n%b\r\n%b" % (response.status_code, headers, bytes(response.body))
