"""When tokens become text: at once while streams are few, a few at a time when there are many."""

# Nobody sees the text of a collected stream before its end; some of it is decoded now and then all the same,
# so that the end is not late.
COLLECTED_INTERVAL_SECONDS = 0.25
# How often tokens are looked for that no step carries along: their sequence was preempted, or a step is long.
FLUSH_SECONDS = 0.02
# Its multiples, modulo 1, lie evenly however many there are.
GOLDEN_RATIO = 0.6180339887


class _Paced:
    """A stream's tokens that wait, when they may go, and whether those before them are still on their way."""

    __slots__ = ("due", "is_collected", "is_under_way", "token_ids")

    def __init__(self, phase: float) -> None:
        self.token_ids: list[int] = []
        self.due = -phase
        self.is_collected = False
        self.is_under_way = False


class Pacer:
    """Bounds the deliveries of all streams together, by holding tokens back before they are decoded.

    Decoding tokens and delivering them (JSON, SSE, socket) costs the loop 40 to 150 µs, be they few or many.
    So a stream's tokens wait, and merge, while the ones before them have not been delivered: a loop that is
    behind gets less to do, not more. And with `n` open streams two deliveries of one stream stand at least
    `n / max_per_second` seconds apart: less than a step for a few streams, so every token is its own chunk. A
    stream keeps its phase, so that deliveries spread over the steps. The first tokens never wait.
    """

    def __init__(self, max_per_second: int) -> None:
        self._max_per_second = max_per_second
        self._streams: dict[int, _Paced] = {}
        self._waiting: dict[int, _Paced] = {}

    @property
    def num_streams(self) -> int:
        """Streams that are open."""
        return len(self._streams)

    @property
    def is_holding(self) -> bool:
        """Whether any tokens wait."""
        return bool(self._waiting)

    def open(self, stream_id: int) -> None:
        """Begin a stream."""
        self._streams[stream_id] = _Paced(phase=stream_id * GOLDEN_RATIO % 1.0)

    def close(self, stream_id: int) -> None:
        """Forget a stream and what it holds."""
        self._streams.pop(stream_id, None)
        self._waiting.pop(stream_id, None)

    def collect(self, stream_id: int) -> None:
        """Nobody reads this stream before its end."""
        if stream_id in self._streams:
            self._streams[stream_id].is_collected = True

    def add(
        self, stream_id: int, token_ids: tuple[int, ...], now: float, *, is_last: bool
    ) -> tuple[int, ...]:
        """Take new tokens; returns those to decode now, none if the stream must wait."""
        stream = self._streams[stream_id]
        if (stream.is_under_way or now < stream.due) and not is_last:
            stream.token_ids += token_ids
            self._waiting[stream_id] = stream
            return ()
        if stream.token_ids:
            token_ids = (*stream.token_ids, *token_ids)
        self._release(stream_id, stream, now)
        return token_ids

    def due(self, now: float) -> list[tuple[int, tuple[int, ...]]]:
        """Tokens that have waited long enough, with their streams."""
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
        """What a stream released has been delivered, or has turned out to be no text yet."""
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
