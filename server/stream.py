"""Deltas of one or more answers -> server-sent events over one response, in whichever dialect.

Each dialect makes the bytes of its events in a class of its own below `Frames`.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol
from uuid import uuid4

import orjson
from sse_starlette import ServerSentEvent
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import EngineError
from engine.outputs import FinishReason
from server.answer import Answer, Delta, abort_all, is_heavy
from server.config import ServerConfig
from server.connection import Connection, chunk_connection
from server.errors import DeadlinePassed, RequestAborted, envelope
from server.parsing.output import ParsedStream
from server.watch import Watch, watch_of

if TYPE_CHECKING:
    from engine import RequestStream

logger = logging.getLogger("monoloop.server")

DONE = b"data: [DONE]\n\n"
MARK = uuid4().hex  # a text that is not in any event
PING = ServerSentEvent(comment="ping", sep="\n").encode()
MAX_QUEUED_DELTAS = 4
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx passes events on at once
)


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
        self.before, self.after = make(-1, MARK).split(b'"' + MARK.encode() + b'"')
        self._before_number, _, self._after_number = self.before.partition(b"-1")

    def fill(self, text: str) -> bytes:
        """Return the event with a text."""
        return self.before + orjson.dumps(text) + self.after

    def fill_numbered(self, number: int, text: str) -> bytes:
        """Return the event with a number and a text."""
        return self._before_number + b"%d" % number + self._after_number + orjson.dumps(text) + self.after


class Frames(ABC):
    """Makes the events of one answer in the words of a dialect."""

    ping = PING  # keeps a quiet stream open

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def takes_long(self, delta: Delta | None) -> bool:
        """Check that the events for `delta`, or of the ending (None), take too long for the loop."""
        return delta is not None and bool(delta.tokens or delta.prompt_tokens) and is_heavy([delta])

    @abstractmethod
    def opening(self) -> bytes:
        """Return what is sent before the first token."""

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
    """The deltas of several streams with their index, as they come.

    The queue is short, so that a slow reader leaves tokens in the mailboxes, where they merge.
    """
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


class EventStream(Response):
    """Sends the events of an answer from the task of its request, and ends its requests whatever happens.

    The head and the opening leave with the first event or ping: an error before that is raised, and has a
    status of its own. The last event leaves with the end of the body. In between, text is
    sent without waking the task where nothing needs to be waited for. A timer pings. Connections look for
    clients that have stopped reading, and interrupt the watch with SlowClient.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: Frames, ping_seconds: float) -> None:
        # Not the base's: there is no body yet, and the head is always the same.
        self._frames = frames
        self._ping_seconds = ping_seconds
        self._num_open = len(frames.answer.streams)
        self._finish_reasons: list[FinishReason] = []
        self._opening = b""
        self._has_begun = False
        self._is_ready = False  # to send deltas at once
        self._is_sending = False
        self._sent_at = 0.0  # when the last event began to be sent
        self._connection: Connection | None
        self._send: Send
        self._watch: Watch
        self._timer: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._connection = chunk_connection(scope)
        self._send, self._watch = send, watch_of(scope)
        self._sent_at = time.monotonic()
        self._set_timer()
        try:
            with self._watch:
                await self._send_events()
        except (DeadlinePassed, RequestAborted) as error:
            self._frames.answer.note_error(error)
            if not self._has_begun:
                raise
            if not self._is_sending:
                await self._end(self._frames.failure(error))
        except BaseException as error:
            self._frames.answer.note_error(error)
            raise
        finally:
            abort_all(self._frames.answer.streams)
            self._offer_to(None)
            if self._timer is not None:
                self._timer.cancel()
            if self._pinging is not None:
                self._pinging.cancel()

    async def _send_events(self) -> None:
        """Send all events; an error becomes one if the status has been sent."""
        frames = self._frames
        try:
            self._opening = frames.opening()
            last = b""
            if self._num_open == 1:
                self._offer_to(self._send_at_once)
                async for delta in frames.answer.streams[0]:
                    self._is_ready = False
                    last = await self._send_delta(0, delta)
                    self._is_ready = True
            else:
                async with aclosing(merge(frames.answer.streams)) as deltas:
                    async for index, delta in deltas:
                        last = await self._send_delta(index, delta)
            is_long = frames.takes_long(None)
            ending = last + (await asyncio.to_thread(frames.ending) if is_long else frames.ending())
            frames.answer.note_finish(self._finish_reasons)
        except Exception as error:
            if not self._has_begun:
                raise
            frames.answer.note_error(error)
            if not isinstance(error, EngineError):
                logger.exception("%s failed while it streamed", frames.answer.id)
            ending = frames.failure(error)
        await self._end(ending)

    def _offer_to(self, take: Callable[[Delta], bool] | None) -> None:
        """Have `take` called with the deltas of the only answer, if the answer has no parser."""
        stream = self._frames.answer.streams[0]
        if self._connection is not None and not isinstance(stream, ParsedStream):
            stream.offer_to(take)

    def _send_at_once(self, delta: Delta) -> bool:
        """Send the events for a delta without waking the request's task; return False if that must wait."""
        connection, frames = self._connection, self._frames
        if not self._has_begun or not self._is_ready or self._is_sending:
            return False
        if connection is None or connection.is_slow:
            return False
        if delta.finish_reason is not None or frames.takes_long(delta):
            return False
        try:
            event = frames.delta(0, delta)
        except Exception:  # a bug, which the task meets again
            return False
        if event:
            self._sent_at = time.monotonic()
            connection.write_chunk(without_line_ends(event))
        return True

    async def _send_delta(self, index: int, delta: Delta) -> bytes:
        """Send the events for a delta; those that end the last answer are returned instead."""
        if delta.finish_reason is not None:
            self._num_open -= 1
            self._finish_reasons.append(delta.finish_reason)
        frames = self._frames
        if frames.takes_long(delta):
            event = await asyncio.to_thread(frames.delta, index, delta)
        else:
            event = frames.delta(index, delta)
        if not self._num_open:
            return event
        if event:
            await self._send_event(event)
        return b""

    async def _end(self, event: bytes) -> None:
        """Send the last event and the end of the body, and nothing after that."""
        self._is_ready = False
        await self._send_event(event)
        self._is_sending = True
        self._watch.note_answered()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_event(self, event: bytes) -> None:
        if self._pinging is not None:
            await asyncio.wait((self._pinging,))
            self._pinging = None
        await self._write(event)

    async def _write(self, event: bytes) -> None:
        self._is_sending, self._sent_at = True, time.monotonic()
        if not self._has_begun:
            self._has_begun = True
            event = self._opening + event
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        data = without_line_ends(event)
        if self._connection is None:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        else:
            await self._connection.send_chunk(data)
        self._is_sending = False

    def _set_timer(self) -> None:
        if self._ping_seconds:
            self._timer = asyncio.get_running_loop().call_later(self._ping_seconds / 4, self._ping_if_quiet)

    def _ping_if_quiet(self) -> None:
        """Send a ping if nothing is being sent, and nothing has been for `ping_seconds`."""
        if not self._is_sending and time.monotonic() - self._sent_at >= self._ping_seconds:
            self._pinging = asyncio.create_task(self._write(self._frames.ping), name="ping")
        self._set_timer()


def stream_answer(config: ServerConfig, frames: Frames) -> EventStream:
    """The response that streams an answer."""
    return EventStream(frames, config.ping_seconds)
