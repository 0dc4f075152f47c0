"""An ASGI peer that reads the stream of an answer, and a connection that keeps its chunks."""

import asyncio
import math

from starlette.types import Message

from server.connection import STATE as CONNECTION
from server.stream import EventStream, Frames
from server.watch import STATE, Watch


class Peer:
    """Keeps what it is sent, and stops reading after `num_messages`."""

    def __init__(self, num_messages: float = math.inf) -> None:
        self.num_messages = num_messages
        self.messages: list[Message] = []
        self.watch = Watch()
        self.scope = {"type": "http", "http_version": "1.1", "method": "POST", "state": {STATE: self.watch}}

    async def send(self, message: Message) -> None:
        self.messages.append(message)
        if len(self.messages) > self.num_messages:
            self.on_stop()
            await asyncio.Event().wait()

    def on_stop(self) -> None:
        """Called when it stops reading."""

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    async def read(self, frames: Frames, *, ping_seconds: float = 0) -> None:
        """Read the stream of an answer, to its end."""
        response = EventStream(frames, ping_seconds)
        async with asyncio.timeout(20):
            await response(self.scope, self.receive, self.send)


class Chunks:
    """Stands in for a connection: keeps the chunks that are sent, in order with the messages of its peer."""

    def __init__(self, peer: Peer) -> None:
        peer.scope["state"][CONNECTION] = self  # type: ignore[index]
        self._peer = peer
        self.is_slow = False
        self.sent: list[bytes] = []
        self.has_sent = asyncio.Event()

    def write_chunk(self, data: bytes) -> None:
        assert [message["type"] for message in self._peer.messages] == ["http.response.start"]
        self.sent.append(data)
        self.has_sent.set()

    async def send_chunk(self, data: bytes) -> None:
        self.write_chunk(data)
