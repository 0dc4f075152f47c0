"""One connection: gives the protocol what its client sends, and writes what the protocol answers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from typing import Protocol as Interface

from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.typing import AppWrapper, ASGIReceiveEvent, ASGISendEvent, ConnectionState
from starlette.types import ASGIApp, Scope

from server.arrivals import ArrivalLimiter
from server.protocol import Protocol
from server.watch import STATE as WATCH
from server.watch import Watch

logger = logging.getLogger("monoloop.server")

READ_BYTES = 2**16
STATE = "connection"  # in the scope's state


class Owner(Interface):
    """What the connections of a server share, and what it does for each of them."""

    app: ASGIApp
    config: Config
    context: WorkerContext
    arrivals: ArrivalLimiter
    send_timeout_seconds: float

    def note_idle(self, connection: "Connection", *, is_idle: bool) -> None:
        """Note that a connection has no request, or has one again."""

    def flush_soon(self, connection: "Connection") -> None:
        """Call the connection's flush() after this turn of the loop."""


class Connection:
    """One connection. What it writes in one turn of the loop leaves in one call."""

    def __init__(
        self,
        owner: Owner,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        is_over_limit: bool,
    ) -> None:
        self.is_over_limit = is_over_limit
        self.has_been_used = False
        self._owner = owner
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
                    self._owner.app,
                    self._owner.config,
                    self._owner.context,
                    self._requests,
                    ConnectionState({STATE: self}),
                    self._writer.get_extra_info("ssl_object") is not None,
                    client,
                    server,
                    self._act,
                    arrivals=self._owner.arrivals,
                    send_timeout_seconds=self._owner.send_timeout_seconds,
                )
                self._last_words = self._protocol.last_words
                self._owner.note_idle(self, is_idle=True)
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
        self._owner.note_idle(self, is_idle=False)
        await self._protocol.handle(Closed())

    async def _wait_for_turn(self, data: bytes) -> None:
        """Wait before a request is parsed that will ask for work: parsing costs as much as what follows."""
        if data.startswith(b"POST"):
            self._owner.note_idle(self, is_idle=False)
            await self._owner.arrivals.enter()
            self._owner.note_idle(self, is_idle=True)

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
            self._owner.note_idle(self, is_idle=event.idle)

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
            self._owner.flush_soon(self)
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
