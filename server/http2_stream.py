"""One request of HTTP/2 as an application sees it."""

import asyncio
from typing import Any, Protocol

from h2.errors import ErrorCodes
from hypercorn.utils import suppress_body
from starlette.types import Message, Scope

from server.watch import STATE as WATCH
from server.watch import Watch


class Transport(Protocol):
    """What a connection does for its streams."""

    async def take_body(self, stream: "Stream") -> None:
        """Let the client send as much again as the application has taken."""

    async def send_head(self, stream: "Stream", status: int, headers: Any) -> None:
        """Send the head of a response."""

    async def send_body(self, stream: "Stream", body: bytes) -> None:
        """Send a part of the body."""

    async def end(self, stream: "Stream") -> None:
        """End a response."""

    async def close(self, stream: "Stream", code: ErrorCodes) -> None:
        """Reset a stream."""


class Stream:
    """One request: what its application receives and sends."""

    def __init__(self, transport: Transport, number: int, scope: Scope) -> None:
        self.number = number
        self.scope = scope
        self.watch: Watch = scope["state"][WATCH]
        self.body = bytearray()  # not yet taken by the application
        self.num_held_bytes = 0  # of the client's window
        self.has_body_ended = False
        self.is_closed = False
        self.window: asyncio.Future[None] | None = None  # while it waits to send
        self.news = asyncio.Event()  # something came, or it was closed
        self._transport = transport
        self._is_body_taken = False
        self._has_begun = False
        self._has_no_body = False

    async def receive(self) -> Message:
        """Return what has come of the body, later that the stream is closed."""
        while not self.is_closed:
            if self.body or self.has_body_ended > self._is_body_taken:
                body = bytes(self.body)
                self.body.clear()
                self._is_body_taken = self.has_body_ended
                await self._transport.take_body(self)
                return {"type": "http.request", "body": body, "more_body": not self._is_body_taken}
            self.news.clear()
            await self.news.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Send a part of the response; None when the application has ended."""
        if self.is_closed:
            await asyncio.sleep(0)  # so that a task that does nothing else can be interrupted
            return
        if message is None:
            if self._has_begun:
                await self._transport.close(self, ErrorCodes.INTERNAL_ERROR)
                return
            headers = [(b"content-length", b"0")]
            await self.send({"type": "http.response.start", "status": 500, "headers": headers})
            message = {"type": "http.response.body"}
        if message["type"] == "http.response.start":
            status = int(message["status"])
            self._has_no_body = suppress_body(self.scope["method"], status)
            self._has_begun = True
            await self._transport.send_head(self, status, message.get("headers", ()))
        elif message["type"] == "http.response.body":
            if (body := message.get("body")) and not self._has_no_body:
                await self._transport.send_body(self, body)
            if not message.get("more_body", False):
                await self._transport.end(self)

    def note_closed(self) -> None:
        """Note that nothing more comes, and nothing more may be sent."""
        self.is_closed = True
        self.news.set()
        self.wake()

    def wake(self) -> None:
        """Let it try to send."""
        if self.window is not None and not self.window.done():
            self.window.set_result(None)
