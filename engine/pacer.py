"""Paces deliveries: immediate for a few streams; tokens of many streams wait and merge."""

from collections.abc import Iterable

from engine.schedule.rows import Progress

# The text of a collected stream is read only at its end; it is still decoded now and then, so that the end is
# not late.
COLLECTED_INTERVAL_SECONDS = 0.25
# Period of a timer that sends tokens no step carries along: their sequence was preempted, or a step is long.
FLUSH_SECONDS = 0.02
# Its multiples modulo 1 are evenly spread, however many there are.
GOLDEN_RATIO = 0.6180339887


class _Paced:
    """The waiting tokens of a stream, when they may leave, and if a delivery of earlier ones is under way."""

    __slots__ = ("due", "is_collected", "is_under_way", "token_ids")

    def __init__(self, phase: float) -> None:
        self.token_ids: list[int] = []
        self.due = -phase
        self.is_collected = False
        self.is_under_way = False


class Pacer:
    """Limits the rate of deliveries over all streams, by holding tokens back before they are decoded.

    Decoding tokens and delivering them (JSON, SSE, socket) costs the loop 40 to 150 µs, whatever their
    number. So a stream's tokens wait, and merge, while earlier ones are not delivered yet: a loop that is
    late gets less to do, not more. With `n` open streams two deliveries of one stream are at least `n /
    max_per_second` seconds apart: less than a step for a few streams, so every token is a chunk of its own. A
    stream keeps its phase, so that deliveries spread over the steps. The first tokens never wait.
    """

    def __init__(self, max_per_second: int) -> None:
        self._max_per_second = max_per_second
        self._streams: dict[int, _Paced] = {}
        self._waiting: dict[int, _Paced] = {}

    @property
    def num_streams(self) -> int:
        """Number of open streams."""
        return len(self._streams)

    @property
    def is_holding(self) -> bool:
        """True if any tokens wait."""
        return bool(self._waiting)

    def is_open(self, stream_id: int) -> bool:
        """Return True for a stream that has begun and is not closed."""
        return stream_id in self._streams

    def open(self, stream_id: int) -> None:
        """Begin a stream."""
        self._streams[stream_id] = _Paced(phase=stream_id * GOLDEN_RATIO % 1.0)

    def close(self, stream_id: int) -> None:
        """Forget a stream and what it holds."""
        self._streams.pop(stream_id, None)
        self._waiting.pop(stream_id, None)

    def collect(self, stream_id: int) -> None:
        """Deliver this stream less often: it is read only at its end."""
        if stream_id in self._streams:
            self._streams[stream_id].is_collected = True

    def add(self, progress: Iterable[Progress], now: float) -> list[Progress]:
        """Add the new tokens of a step; return the open streams that deliver now, with all of their tokens.

        A stream that ends delivers at once.
        """
        streams, waiting = self._streams, self._waiting
        released = []
        for sequence, token_ids in progress:
            stream = streams.get(sequence.id)
            if stream is None:
                continue
            if (stream.is_under_way or now < stream.due) and sequence.finish_reason is None:
                stream.token_ids += token_ids
                waiting[sequence.id] = stream
                continue
            if stream.token_ids:
                token_ids = (*stream.token_ids, *token_ids)
            self._release(sequence.id, stream, now)
            released.append((sequence, token_ids))
        return released

    def due(self, now: float) -> list[tuple[int, tuple[int, ...]]]:
        """Return the streams whose tokens have waited long enough, with the tokens."""
        due = [
            (stream_id, stream)
            for stream_id, stream in self._waiting.items()
            if now >= stream.due and not stream.is_under_way
        ]
        released = [(stream_id, tuple(stream.token_ids)) for stream_id, stream in due]
        for stream_id, stream in due:
            self._release(stream_id, stream, now)
        return released

    def delivered(self, stream_id: int) -> None:
        """The released tokens of a stream have been delivered, or made no text yet."""
        if stream_id in self._streams:
            self._streams[stream_id].is_under_way = False

    def _release(self, stream_id: int, stream: _Paced, now: float) -> None:
        interval = (
            COLLECTED_INTERVAL_SECONDS if stream.is_collected else self.num_streams / self._max_per_second
        )
        stream.due = now + interval - (now - stream.due) % interval
        stream.token_ids = []
        stream.is_under_way = True
        self._waiting.pop(stream_id, None)
