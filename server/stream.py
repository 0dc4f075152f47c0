"""Deltas of one or more answers -> server-sent events over one response, in whichever dialect.

Each dialect makes the bytes of its events in a class of its own below `Frames`.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol
from uuid import uuid4

import orjson
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from engine.errors import EngineError
from server.answer import Answer, Delta, abort_all, is_heavy
from server.errors import DeadlinePassed, envelope
from server.parsing.output import ParsedStream
from server.settings import ServerConfig

if TYPE_CHECKING:
    from engine import RequestStream

logger = logging.getLogger("monoloop.server")
logging.getLogger("sse_starlette").setLevel(logging.WARNING)  # its debug log repeats every chunk

DONE = b"data: [DONE]\n\n"
PING = ServerSentEvent(comment="ping", sep="\n")
MAX_QUEUED_DELTAS = 4


class TypedBody(Protocol):
    """A body that says what it is."""

    @property
    def type(self) -> str: ...

    def model_dump_json(self) -> str: ...


def named_event(body: TypedBody) -> bytes:
    """An event of the dialects that name theirs: by the type of the body."""
    return f"event: {body.type}\ndata: {body.model_dump_json()}\n\n".encode()


class JsonTemplate:
    """An event as bytes with holes, cut out of the schema's own JSON so that it cannot drift from it.

    `make(number, text)` builds the event. The text is one hole; a number written before it is the other.
    """

    def __init__(self, make: Callable[[int, str], bytes]) -> None:
        mark = uuid4().hex
        self.before, self.after = make(-1, mark).split(b'"' + mark.encode() + b'"')
        self._before_number, _, self._after_number = self.before.partition(b"-1")

    def fill(self, text: str) -> bytes:
        """Return the event with a text."""
        return self.before + orjson.dumps(text) + self.after

    def fill_numbered(self, number: int, text: str) -> bytes:
        """Return the event with a number and a text."""
        return self._before_number + b"%d" % number + self._after_number + orjson.dumps(text) + self.after


class Frames(ABC):
    """Makes the events of one answer in the words of a dialect."""

    ping = PING  # what keeps a quiet stream open

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def takes_long(self, delta: Delta | None) -> bool:
        """Check that the events for `delta`, or of the ending (None), take too long for the loop."""
        return delta is not None and bool(delta.tokens or delta.prompt_tokens) and is_heavy([delta])

    @abstractmethod
    def opening(self) -> bytes:
        """Return what is sent at once, before the first token."""

    @abstractmethod
    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the events for what is new of answer `index`; none while text is held back."""

    @abstractmethod
    def ending(self) -> bytes:
        """Return what is sent when every answer has ended."""

    @abstractmethod
    def failure(self, error: Exception) -> bytes:
        """Return what is sent in place of the rest: the status has been sent."""


async def merge(
    streams: Sequence["RequestStream | ParsedStream"],
) -> AsyncGenerator[tuple[int, Delta], None]:
    """The deltas of several streams with their index, as they come; one alone is passed through.

    The queue is short, so that a slow reader leaves tokens in the mailboxes, where they merge.
    """
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue(MAX_QUEUED_DELTAS)

    async def pump(index: int) -> None:
        try:
            async for delta in streams[index]:
                await queue.put((index, delta))
        except Exception as error:
            await queue.put((index, error))
        else:
            await queue.put((index, None))

    pumps = [asyncio.create_task(pump(index)) for index in range(len(streams))]
    try:
        running = len(pumps)
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in pumps:
            task.cancel()


async def events(frames: Frames) -> AsyncGenerator[bytes, None]:
    """All events of an answer; an error becomes an event, since the status has been sent."""
    if opening := frames.opening():
        yield opening
    num_open = len(frames.answer.streams)
    last = b""
    try:
        async with aclosing(merge(frames.answer.streams)) as deltas:
            async for index, delta in deltas:
                num_open -= delta.finish_reason is not None
                if frames.takes_long(delta):
                    event = await asyncio.to_thread(frames.delta, index, delta)
                else:
                    event = frames.delta(index, delta)
                if not num_open:
                    last = event  # it leaves in one write with the ending
                elif event:
                    yield event
        is_long = frames.takes_long(None)
        ending = last + (await asyncio.to_thread(frames.ending) if is_long else frames.ending())
    except Exception as error:
        if not isinstance(error, EngineError):
            logger.exception("%s failed while it streamed", frames.answer.id)
        ending = frames.failure(error)
    yield ending


def error_event(error: Exception) -> bytes:
    """The error envelope as an event, and the end of the stream."""
    return b"data: " + envelope(error).model_dump_json().encode() + b"\n\n" + DONE


# Readers that split text as Python's str.splitlines() does, httpx among them, end a line at each of these.
LINE_ENDS = {"\x85".encode(): rb"\u0085", "\u2028".encode(): rb"\u2028", "\u2029".encode(): rb"\u2029"}


def without_line_ends(event: bytes) -> bytes:
    """The event with what some take for the end of a line escaped, as JSON lets it be."""
    if b"\xc2\x85" in event or b"\xe2\x80" in event:
        for data, escaped in LINE_ENDS.items():
            event = event.replace(data, escaped)
    return event


class SlowClient(Exception):
    """A client has not read for longer than `send_timeout_seconds`."""


class EventStream(EventSourceResponse):
    """Sends events, and ends their requests whatever happens.

    sse-starlette brings the headers, the ping and the watch for a client that leaves. Its own way of sending
    a chunk costs 12 µs (a cancel scope and a log call each) where a plain StreamingResponse needs 0.6, so the
    chunks go straight to `send` from inside the iterator it drives (0.6 µs), and a timer looks for a client
    that has stopped reading.
    """

    def __init__(
        self,
        content: AsyncGenerator[bytes, None],
        on_close: Callable[[], None],
        *,
        ping_seconds: float,
        send_timeout_seconds: float,
        deadline: float | None = None,
        ping: ServerSentEvent = PING,
        failure: Callable[[Exception], bytes] = error_event,
    ) -> None:
        super().__init__(self._send_all(), ping=ping_seconds, ping_message_factory=lambda: ping, sep="\n")
        self._content = content
        self._on_close = on_close
        self._failure = failure
        self._send_timeout_seconds = send_timeout_seconds
        self._deadline = deadline
        self._send: Send
        self._sending_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        try:
            await super().__call__(scope, receive, send)
        except SlowClient:
            logger.info("a client stopped reading; its stream was ended")
        finally:
            self._on_close()  # not in the iterator: one that was never started runs no `finally`
            if self._timer is not None:
                self._timer.cancel()

    async def _send_all(self) -> AsyncGenerator[bytes, None]:
        """Send every event. Yields only what ends a stream that is past its deadline."""
        clock, send = asyncio.get_running_loop().time, self._send
        try:
            async with asyncio.timeout(None) as guard, aclosing(self._content) as content:
                self._look(guard)
                async for event in content:
                    self._sending_since = clock()
                    body = without_line_ends(event)
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    self._sending_since = None
        except TimeoutError:
            if self._sending_since is not None:
                raise SlowClient from None
            yield self._failure(DeadlinePassed("The answer took longer than this server allows."))

    def _look(self, guard: asyncio.Timeout) -> None:
        """Every now and then: has a send been stuck for too long, or the deadline passed?"""
        loop = asyncio.get_running_loop()
        now = loop.time()
        stuck_since = now if self._sending_since is None else self._sending_since
        if now - stuck_since >= self._send_timeout_seconds or (
            self._deadline is not None and now >= self._deadline
        ):
            guard.reschedule(now)
            return
        again = now + self._send_timeout_seconds / 4
        self._timer = loop.call_at(
            again if self._deadline is None else min(again, self._deadline), self._look, guard
        )


def stream_answer(config: ServerConfig, frames: Frames, started: float) -> EventStream:
    """The response that streams an answer; `started` is the loop's time when its request arrived."""
    limit = config.request_timeout_seconds
    return EventStream(
        events(frames),
        lambda: abort_all(frames.answer.streams),
        ping_seconds=config.ping_seconds,
        send_timeout_seconds=config.send_timeout_seconds,
        deadline=None if limit is None else started + limit,
        ping=frames.ping,
        failure=frames.failure,
    )
