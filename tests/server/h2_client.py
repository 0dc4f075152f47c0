"""A client of HTTP/2 that can be rude: it sends what h2 lets it, and keeps what comes."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)
from h2.settings import SettingCodes

SECONDS = 20


class H2Client:
    """One connection. Opens its windows again as data comes, unless it `is_stingy`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        config = H2Configuration(client_side=True, header_encoding="utf-8", validate_outbound_headers=False)
        self.frames = H2Connection(config)
        self.is_stingy = False
        self.statuses: dict[int, int] = {}
        self.headers: dict[int, dict[str, str]] = {}
        self.bodies: dict[int, bytes] = defaultdict(bytes)
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}
        self.goaway: int | None = None
        self.is_closed = False

    @classmethod
    async def connect(cls, port: int, window: int | None = None) -> "H2Client":
        """Connect, with `window` bytes for each stream."""
        client = cls(*await asyncio.open_connection("127.0.0.1", port))
        if window is not None:
            client.frames.local_settings[SettingCodes.INITIAL_WINDOW_SIZE] = window
            client.frames.local_settings.acknowledge()
        client.frames.initiate_connection()
        client.flush()
        return client

    def flush(self) -> None:
        """Send what is to be sent."""
        self.writer.write(self.frames.data_to_send())

    def begin(
        self,
        path: str = "/",
        body: bytes | None = None,
        *,
        method: str = "POST",
        end: bool = True,
        **headers: str,
    ) -> int:
        """Send a request, to be completed later without `end`, at the next flush; return its stream."""
        number = self.frames.get_next_available_stream_id()
        fields = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "test")]
        fields += [(name.replace("_", "-"), text) for name, text in headers.items()]
        self.frames.send_headers(number, fields, end_stream=end and body is None)
        if body is not None:
            self.frames.send_data(number, body, end_stream=end)
        return number

    def send(self, path: str = "/", body: bytes | None = None, **options: Any) -> int:
        """Send a request now."""
        number = self.begin(path, body, **options)
        self.flush()
        return number

    async def until(self, condition: Callable[[], object]) -> None:
        """Read until a condition holds."""
        async with asyncio.timeout(SECONDS):
            while not condition():
                assert not self.is_closed, f"closed: {self.statuses=} {self.resets=} {self.goaway=}"
                await self._read()

    async def until_closed(self) -> None:
        """Read until the server closes the connection."""
        async with asyncio.timeout(SECONDS):
            while not self.is_closed:
                await self._read()

    async def answer(self, number: int) -> tuple[int, bytes]:
        """Return the status and the body of a stream's answer, once it is complete."""
        await self.until(lambda: number in self.ended)
        return self.statuses[number], self.bodies[number]

    async def _read(self) -> None:
        try:
            data = await self._reader.read(65536)
        except ConnectionError:
            data = b""
        self.is_closed = not data
        for event in self.frames.receive_data(data):
            self._note(event)
        self.flush()

    def _note(self, event: Event) -> None:
        if isinstance(event, ResponseReceived):
            self.headers[event.stream_id] = dict(event.headers)
            self.statuses[event.stream_id] = int(self.headers[event.stream_id][":status"])
        elif isinstance(event, DataReceived):
            self.bodies[event.stream_id] += event.data
            if event.flow_controlled_length and not self.is_stingy:
                self.frames.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, StreamEnded):
            self.ended.add(event.stream_id)
        elif isinstance(event, StreamReset):
            self.resets[event.stream_id] = event.error_code
        elif isinstance(event, ConnectionTerminated):
            self.goaway = event.error_code

    async def close(self) -> None:
        """Close the connection."""
        self.writer.close()
