"""Connections: HTTP/1.1 and HTTP/2 on sockets, and no more than may be open.

Every connection is a file descriptor, and a process has a limited number. Near that limit, connections
without a request are closed, the longest idle first; if all have one, requests on further connections get 503
(probes are answered), from descriptors that are kept in reserve for it.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.typing import AppWrapper, ASGIReceiveEvent, ASGISendEvent, ConnectionState
from starlette.types import ASGIApp, Scope

from server.arrivals import ArrivalLimiter
from server.deadlines import Deadlines
from server.file_limit import file_limit
from server.protocol import Protocol
from server.watch import STATE as WATCH
from server.watch import SlowClient, Watch

logger = logging.getLogger("monoloop.server")

RESERVED_FILES = 64
# A new connection that has sent nothing for this long may be closed like one that waits for its next request.
FRESH_SECONDS = 1.0
LOG_EVERY_SECONDS = 60.0
READ_BYTES = 2**16
# Each costs the loop 0.3 ms: hundreds in one turn would stop all streams. Others wait in the listen queue.
ACCEPTS_PER_TURN = 4
RETRY_ACCEPT_SECONDS = 1.0
CUT_SECONDS = 2.0  # for requests that are cancelled, to end
HANDSHAKE_SECONDS = 10.0
STATE = "connection"  # in the scope's state


class Connections:
    """Takes connections from a listening socket and serves an application on them."""

    def __init__(
        self,
        app: ASGIApp,
        config: Config,
        send_timeout_seconds: float = 60,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._app = app
        self._config = config
        self._tls = tls
        self._context = WorkerContext(None)
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[Connection] = set()  # without those that are closed for others
        self._capacity = file_limit()  # how many may be open; learned when the reserve is reached
        # Those without a request.
        self._waiting: Deadlines[Connection] = Deadlines(config.keep_alive_timeout, Connection.close)
        self._unflushed: list[Connection] = []
        self.send_timeout_seconds = send_timeout_seconds
        self._written: set[Connection] = set()  # since their clients were last seen to have read everything
        self._timer: asyncio.TimerHandle | None = None
        self.arrivals = ArrivalLimiter()
        self._logged_at = -LOG_EVERY_SECONDS

    async def serve(self, listener: socket.socket, ended: asyncio.Event) -> None:
        """Serve until `ended` is set; then close idle connections, and busy ones after `graceful_timeout`."""
        listener.setblocking(False)
        self._listen(listener)
        try:
            await ended.wait()
            self._stop_listening(listener)
            await self._context.terminated.set()
            for connection in self._waiting.clear():
                connection.close()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=self._config.graceful_timeout)
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

    def note_idle(self, connection: "Connection", *, is_idle: bool) -> None:
        """Note that a connection has no request, or has one again."""
        if not is_idle:
            self._waiting.discard(connection)
        elif self._context.terminated.is_set():
            connection.close()
        else:
            self._waiting.add(connection)

    def flush_soon(self, connection: "Connection") -> None:
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
            client.close()
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
        connection = Connection(self, self._app, self._config, self._context, reader, writer, is_over_limit)
        self._open.add(connection)
        try:
            await connection.run()
            await connection.closed()
        finally:
            self._open.discard(connection)
            self._waiting.discard(connection)
            self._written.discard(connection)
            connection.cut()

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


class Connection:
    """One connection. What it writes in one turn of the loop leaves in one call."""

    def __init__(
        self,
        connections: Connections,
        app: ASGIApp,
        config: Config,
        context: WorkerContext,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        is_over_limit: bool,
    ) -> None:
        self.is_over_limit = is_over_limit
        self.has_been_used = False
        self._connections = connections
        self._app = app
        self._config = config
        self._context = context
        self._reader = reader
        self._writer = writer
        self._transport = writer.transport
        self._loop = asyncio.get_running_loop()
        self._unsent: list[bytes] = []
        self._num_written = 0  # bytes
        self._num_read = -1
        self._read_at = 0.0
        self._has_ended = False
        self._is_between_requests = True  # nothing of the next one has come
        self._last_words: Callable[[], bytes] = bytes

    async def run(self) -> None:
        """Serve until one of both sides closes the connection."""
        client, server = (
            address[:2] if isinstance(address := self._writer.get_extra_info(name), tuple) else None
            for name in ("peername", "sockname")
        )
        try:
            async with Requests(self._loop) as self._requests:
                self._protocol = Protocol(
                    self._app,
                    self._config,
                    self._context,
                    self._requests,
                    ConnectionState({STATE: self}),
                    self._writer.get_extra_info("ssl_object") is not None,
                    client,
                    server,
                    self._act,
                    arrivals=self._connections.arrivals,
                    send_timeout_seconds=self._connections.send_timeout_seconds,
                )
                self._last_words = self._protocol.last_words
                self._connections.note_idle(self, is_idle=True)
                await self._read_all()
        finally:
            self._last_words = bytes
            del self._protocol  # they refer to each other: only the collector would free them

    async def _read_all(self) -> None:
        """Give the protocol what the client sends, to its end."""
        try:
            while data := await self._reader.read(READ_BYTES):
                if self._is_between_requests:
                    self._is_between_requests = False
                    await self._wait_for_turn(data)
                await self._protocol.handle(RawData(data))
        except OSError:
            pass
        self._has_ended = True
        self._connections.note_idle(self, is_idle=False)
        await self._protocol.handle(Closed())

    async def _wait_for_turn(self, data: bytes) -> None:
        """Wait before a request is parsed that will ask for work: parsing costs as much as what follows."""
        if data.startswith(b"POST"):
            self._connections.note_idle(self, is_idle=False)
            await self._connections.arrivals.enter()
            self._connections.note_idle(self, is_idle=True)

    async def _act(self, event: Event) -> None:
        """Act on an event of the protocol."""
        if isinstance(event, RawData):
            self._send_soon(event.data)
            await self._drain()
        elif isinstance(event, Closed):
            self.close()
        elif isinstance(event, Updated) and not self._has_ended:
            self.has_been_used = True
            self._is_between_requests = event.idle
            self._connections.note_idle(self, is_idle=event.idle)

    @property
    def is_slow(self) -> bool:
        """Return True if the client has yet to read what was sent."""
        return bool(self._transport.get_write_buffer_size())

    def write_chunk(self, data: bytes) -> None:
        """Write a part of the body of a response in HTTP/1.1 that has begun, and has no length.

        hypercorn and h11 would send the same with 60 calls of functions for each part. The end of the body is
        left to them; the last part leaves with it.
        """
        if not self._has_ended:
            self._send_soon(b"%x\r\n%b\r\n" % (len(data), data))

    async def send_chunk(self, data: bytes) -> None:
        """Write a part, and wait while the client reads too slowly."""
        self.write_chunk(data)
        await self._drain()

    def last_read_at(self) -> float:
        """Return when the client was first seen to have read as much as it has; calls must come regularly."""
        num_read = self._num_written - self._transport.get_write_buffer_size()
        if num_read != self._num_read:
            self._num_read, self._read_at = num_read, self._loop.time()
        return self._read_at

    def close(self) -> None:
        """Send what is left, and close."""
        if last_words := self._last_words():
            self._send_soon(last_words)
        self.flush()
        self._transport.close()

    async def closed(self) -> None:
        """Close, and wait until all is sent."""
        self.close()
        try:
            await self._writer.wait_closed()
        except OSError as error:
            # The reader keeps it, and it the frames of all who read: only the collector would free them.
            error.__traceback__ = None

    def cut(self, reason: Exception | None = None) -> None:
        """Close without what has yet to be sent, and end the requests for a reason."""
        if reason is not None:
            self._requests.interrupt(reason)
        self._transport.abort()

    def _send_soon(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        if not self._unsent:
            self._connections.flush_soon(self)
        self._unsent.append(data)

    def flush(self) -> None:
        """Send what has been written since the last time."""
        if self._unsent and not self._transport.is_closing():
            data = b"".join(self._unsent)
            self._num_written += len(data)
            self._transport.write(data)
        self._unsent.clear()

    async def _drain(self) -> None:
        """Wait while the client reads too slowly."""
        if self.is_slow:
            try:
                await self._writer.drain()
            except OSError:  # not in this task, which the protocol may interrupt
                self._requests.spawn(self._protocol.handle, Closed())


class Requests(TaskGroup):  # type: ignore[misc]  # its package is not checked
    """The tasks of a connection: one for each request, and those of the protocol."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._watches: set[Watch] = set()

    def interrupt(self, reason: Exception) -> None:
        """End all requests with a reason."""
        for watch in self._watches:
            watch.interrupt(reason)

    async def spawn_app(
        self,
        app: AppWrapper,
        config: Config,
        scope: Any,
        send: Callable[[ASGISendEvent | None], Awaitable[None]],
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        """Begin a request; returns what takes its messages, of which a disconnect is noticed at once."""
        messages: asyncio.Queue[ASGIReceiveEvent] = asyncio.Queue(config.max_app_queue_size)
        watch = scope["state"][WATCH] = Watch(is_informed=True)

        async def put(message: ASGIReceiveEvent) -> None:
            if message["type"] == "http.disconnect":
                watch.client_left()
            await messages.put(message)

        self.begin(app, scope, messages.get, send)
        return put

    def begin(self, app: Any, scope: Any, receive: Any, send: Any) -> None:
        """Begin a request with its watch, receive and send."""
        watch = scope["state"][WATCH]
        self._watches.add(watch)
        task = self._task_group.create_task(answer(app, scope, receive, send))
        task.add_done_callback(lambda _: self._watches.discard(watch))


async def answer(
    app: Any, scope: Any, receive: Any, send: Callable[[ASGISendEvent | None], Awaitable[None]]
) -> None:
    """Run a request, and send the protocol None at its end, unless its connection is cut meanwhile."""
    try:
        await app(scope, receive, send)
    except (Exception, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # and send nothing: that could wait for a client that does not read
        logger.exception("a request failed")
    await send(None)


def chunk_connection(scope: Scope) -> Connection | None:
    """Return the connection on which a response without a length is sent in chunks: in HTTP/1.1."""
    connection: Connection | None = scope.get("state", {}).get(STATE)
    return connection if scope["http_version"] == "1.1" else None


def is_over_limit(scope: Scope) -> bool:
    """Check that a request came on a connection for which there was no room."""
    connection: Connection | None = scope.get("state", {}).get(STATE)
    return connection is not None and connection.is_over_limit
