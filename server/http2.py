"""HTTP/2 on a connection, with h2, which knows frames: its streams as requests of an application.

hypercorn's protocol is not used: an exception in one of its streams ends all of the connection, it takes at
most 1,000, and it keeps whole answers in memory for a client that does not read them.
"""

import asyncio
import logging
from typing import Any
from urllib.parse import unquote

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import H2Error, InvalidBodyLengthError, ProtocolError
from h2.settings import SettingCodes, Settings
from hypercorn.config import Config
from hypercorn.events import Closed, RawData, Updated
from hypercorn.typing import ConnectionState, WorkerContext
from hypercorn.utils import filter_pseudo_headers
from starlette.types import ASGIApp, Scope

from server.arrivals import ArrivalLimiter
from server.http2_stream import Stream
from server.watch import STATE as WATCH
from server.watch import SlowClient, Watch

logger = logging.getLogger("monoloop.server")

PREFACE_BYTES = 24
HEAD_BYTES = 9  # of a frame: length in 3 bytes, type, flags, stream
# Of frames that cost h2 up to 0.05 ms each and the application nothing.
CHEAP_FRAMES_PER_TURN = 32
CHEAP_FRAMES = {0, 8}  # DATA, WINDOW_UPDATE
SENT_FRAME_BYTES = 2**14  # every client takes as much
# RFC 9113, section 8.2.2.
HEADERS_OF_HTTP1 = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}


class Frames(H2Connection):
    """h2, with a malformed request as an error of its stream: RFC 9113, section 8.1.1."""

    def _receive_frame(self, frame: Any) -> list[Event]:
        was_open = frame.stream_id in self.streams
        try:
            return super()._receive_frame(frame)
        except ProtocolError as error:
            is_new = not was_open and frame.stream_id in self.streams  # so its headers have been decoded
            if not is_new and not isinstance(error, InvalidBodyLengthError):
                raise
            self.reset_stream(frame.stream_id, ErrorCodes.PROTOCOL_ERROR)
            if isinstance(error, InvalidBodyLengthError) and frame.flow_controlled_length:
                self.increment_flow_control_window(frame.flow_controlled_length)
            return [StreamReset(stream_id=frame.stream_id)]


class Http2:
    """One connection and its streams.

    Each request's own task sends its response, and waits while the client's windows are full; those who wait
    for the window of the connection get it one frame each, in turn.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: Config,
        context: WorkerContext,
        requests: Any,  # begins them
        state: ConnectionState,
        ssl: bool,
        client: tuple[str, int] | None,
        server: tuple[str, int] | None,
        send: Any,
        *,
        arrivals: ArrivalLimiter,
        send_timeout_seconds: float,
    ) -> None:
        self._app = app
        self._config = config
        self._context = context
        self._requests = requests
        self._scope = {
            "type": "http",
            "http_version": "2",
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "scheme": "https" if ssl else "http",
            "root_path": config.root_path,
            "client": client,
            "server": server,
        }
        self._state = state
        self._send = send
        self._arrivals = arrivals
        self._send_timeout_seconds = send_timeout_seconds
        self._frames = Frames(H2Configuration(client_side=False, header_encoding=None))
        self._frames.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: config.h2_max_concurrent_streams,
                SettingCodes.MAX_HEADER_LIST_SIZE: config.h2_max_header_list_size,
            },
        )
        self._received = bytearray()
        self._has_preface = False
        self._num_frames = 0
        self._streams: dict[int, Stream] = {}
        self._waiting: dict[Stream, None] = {}  # for the connection's window, the longest first
        self._is_closed = False

    async def begin(self) -> None:
        """Begin the connection."""
        self._frames.initiate_connection()
        await self._flush()
        await self._send(Updated(idle=True))

    async def begin_upgraded(self, settings: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Begin a connection that was HTTP/1.1, with the settings and the request that came there."""
        try:
            self._frames.initiate_upgrade_connection(settings)
        except Exception:  # of settings that are none
            await self.leave()
            return
        await self._flush()
        await self._begin_request(1, headers)
        await self._act(StreamEnded(stream_id=1))

    async def handle(self, event: Any) -> None:
        """Take what the client sends, or that it has left."""
        if isinstance(event, Closed):
            self._close_all()
            return
        if self._is_closed:
            return
        try:
            await self._receive(event.data)
        except Exception as error:  # H2Error: the client broke the protocol, and is sent what h2 says to that
            if not isinstance(error, H2Error):
                logger.exception("a connection failed")
            await self.leave()

    async def leave(self) -> None:
        """Close the connection and all its streams."""
        self._close_all()
        await self._flush()
        await self._send(Closed())

    def last_words(self) -> bytes:
        """Return a GOAWAY: what the client sent after the last request here, it may send elsewhere."""
        if self._is_closed:  # by the client, or for an error
            return b""
        self._close_all()
        self._frames.close_connection()
        return self._frames.data_to_send()

    async def _receive(self, data: bytes) -> None:
        self._received += data
        while not self._is_closed and (frame := self._next_frame()):
            for event in self._frames.receive_data(frame):
                await self._act(event)
            await self._flush()
            self._num_frames += 1
            if frame[3] not in CHEAP_FRAMES or self._num_frames % CHEAP_FRAMES_PER_TURN == 0:
                await asyncio.sleep(0)  # others get their share of the loop

    def _next_frame(self) -> bytes:
        """Take the next frame out of what was received; nothing if it is not complete."""
        num_bytes = PREFACE_BYTES
        if self._has_preface:
            num_bytes = int.from_bytes(self._received[:3], "big")
            if num_bytes > self._frames.max_inbound_frame_size:
                self._frames.close_connection(ErrorCodes.FRAME_SIZE_ERROR)
                raise ProtocolError
            num_bytes += HEAD_BYTES
        if len(self._received) < num_bytes:
            return b""
        self._has_preface = True
        frame = bytes(self._received[:num_bytes])
        del self._received[:num_bytes]
        return frame

    async def _act(self, event: Event) -> None:
        """Act on an event of h2."""
        if isinstance(event, RequestReceived):
            await self._begin_request(event.stream_id, event.headers)
        elif isinstance(event, ConnectionTerminated):
            await self.leave()
        elif isinstance(event, RemoteSettingsChanged):
            if SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings:
                for stream in self._streams.values():
                    stream.wake()
        elif isinstance(event, WindowUpdated) and not event.stream_id:
            self._wake_next()
        elif isinstance(event, DataReceived) and event.flow_controlled_length:
            self._frames.increment_flow_control_window(event.flow_controlled_length)
        await self._tell(self._streams.get(getattr(event, "stream_id", 0)), event)

    async def _tell(self, stream: Stream | None, event: Event) -> None:
        """Act on an event of a stream, if it is open."""
        if stream is None:
            return
        if isinstance(event, DataReceived):
            stream.body += event.data
            stream.num_held_bytes += event.flow_controlled_length
            stream.news.set()
        elif isinstance(event, StreamEnded):
            stream.has_body_ended = True
            stream.news.set()
        elif isinstance(event, StreamReset):
            await self._remove(stream)
            stream.watch.client_left()
        elif isinstance(event, WindowUpdated):
            stream.wake()

    async def _begin_request(self, number: int, headers: Any) -> None:
        """Begin the request of a new stream, in its turn if it asks for work."""
        if self._context.terminated.is_set():
            self._frames.reset_stream(number, ErrorCodes.REFUSED_STREAM)
            return
        try:
            stream = Stream(self, number, self._scope_of(headers))
        except (KeyError, ValueError):  # no path, or one that is not ASCII
            self._frames.reset_stream(number, ErrorCodes.PROTOCOL_ERROR)
            return
        if not self._streams:
            await self._send(Updated(idle=False))
        self._streams[number] = stream
        if stream.scope["method"] == "POST":
            await self._arrivals.enter()
        if not self._is_closed:
            self._requests.begin(self._app, stream.scope, stream.receive, stream.send)

    def _scope_of(self, headers: list[tuple[bytes, bytes]]) -> Scope:
        """Return the scope of a request. Raises KeyError, ValueError."""
        fields = dict(headers)
        path, _, query = fields[b":path"].partition(b"?")
        return {
            **self._scope,
            "method": fields[b":method"].decode("ascii").upper(),
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "headers": filter_pseudo_headers(headers),
            "state": {**self._state, WATCH: Watch(is_informed=True)},
            "extensions": {},
        }

    async def take_body(self, stream: Stream) -> None:
        """The application has taken what came of the body: let the client send as much again."""
        num_bytes, stream.num_held_bytes = stream.num_held_bytes, 0
        if num_bytes and not stream.has_body_ended:
            self._frames.increment_flow_control_window(num_bytes, stream.number)
            await self._flush()

    async def send_head(self, stream: Stream, status: int, headers: Any) -> None:
        """Send the head of a response."""
        kept = [(name, value) for name, value in headers if name.lower() not in HEADERS_OF_HTTP1]
        kept += self._config.response_headers("h2")
        self._frames.send_headers(stream.number, [(b":status", b"%d" % status), *kept])
        await self._flush()

    async def send_body(self, stream: Stream, body: bytes) -> None:
        """Send a part of the body, as far and as fast as the client takes it."""
        rest = memoryview(body)
        try:
            while rest and not stream.is_closed:
                num_bytes = min(
                    len(rest), SENT_FRAME_BYTES, self._frames.local_flow_control_window(stream.number)
                )
                if num_bytes <= 0:
                    await self._wait_for_window(stream)
                    continue
                self._frames.send_data(stream.number, bytes(rest[:num_bytes]))
                rest = rest[num_bytes:]
                await self._flush()
                if rest:
                    self._wake_next()
                    await asyncio.sleep(0)
        finally:
            self._wake_next()

    async def _wait_for_window(self, stream: Stream) -> None:
        """Wait until the client may take more; end a stream for which that takes too long."""
        stream.window = asyncio.get_running_loop().create_future()
        if self._frames.streams[stream.number].outbound_flow_control_window > 0:
            self._waiting[stream] = None  # the connection's is full
        else:
            self._wake_next()
        try:
            async with asyncio.timeout(self._send_timeout_seconds):
                await stream.window
        except TimeoutError:
            logger.info("a client stopped reading; its stream is reset")
            await self.close(stream, ErrorCodes.CANCEL)
            stream.watch.interrupt(SlowClient())
            await asyncio.sleep(0)  # it interrupts this task here, or else in what follows
        finally:
            stream.window = None
            self._waiting.pop(stream, None)

    def _wake_next(self) -> None:
        """Let the stream send that has waited longest for the connection's window."""
        if self._waiting and self._frames.outbound_flow_control_window > 0:
            stream = next(iter(self._waiting))
            del self._waiting[stream]
            stream.wake()

    async def end(self, stream: Stream) -> None:
        """End a response, and refuse what is left of the request."""
        if not stream.is_closed:
            self._frames.end_stream(stream.number)
            await self.close(stream, None if stream.has_body_ended else ErrorCodes.NO_ERROR)

    async def close(self, stream: Stream, code: ErrorCodes | None) -> None:
        """Close a stream, with a reset for the reason `code` if it is not complete."""
        if stream.is_closed:
            return
        if code is not None:
            self._frames.reset_stream(stream.number, code)
        await self._remove(stream)

    async def _remove(self, stream: Stream) -> None:
        """Forget a stream, and note that the connection is idle if it was the last."""
        del self._streams[stream.number]
        stream.note_closed()
        await self._flush()
        if not self._streams and not self._is_closed:
            await self._send(Updated(idle=True))

    def _close_all(self) -> None:
        self._is_closed = True
        for stream in self._streams.values():
            stream.note_closed()
            stream.watch.client_left()
        self._streams.clear()

    async def _flush(self) -> None:
        if data := self._frames.data_to_send():
            await self._send(RawData(data))
