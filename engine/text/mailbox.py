"""Deltas of one request on their way to its handler: merged while nobody takes them, paced under load."""

import asyncio

from engine.outputs import TextDelta


class Pacer:
    """Bounds the deliveries of all streams together.

    A delivery costs the loop tens of microseconds (JSON, SSE, socket), so about 25,000 a second fill it.
    With `n` open streams two deliveries of one stream stand `n / max_per_second` seconds apart: a fraction
    of a millisecond for a few streams, so every token is its own chunk; longer than a step for hundreds of
    fast ones, so tokens merge instead of queueing.
    """

    def __init__(self, max_per_second: int) -> None:
        self._max_per_second = max_per_second
        self.num_streams = 0

    @property
    def interval_seconds(self) -> float:
        """Shortest time between two deliveries of one stream."""
        return self.num_streams / self._max_per_second


class Mailbox:
    """One slot that holds everything not yet taken. One producer and one consumer, both on the loop.

    The size is bounded by the request's own `max_tokens`: a consumer that never comes costs one string.
    """

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._loop = asyncio.get_running_loop()
        self._texts: list[str] = []
        self._num_tokens = 0
        self._last: TextDelta | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._next_delivery = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether the last delta or an error has arrived."""
        return self._last is not None or self._error is not None

    def put(self, delta: TextDelta) -> None:
        """Add a delta. One with a finish reason is the last."""
        self._texts.append(delta.text)
        self._num_tokens += delta.num_tokens
        if delta.finish_reason is not None:
            self._last = delta
            self._wake()
        elif self._waiter is not None and self._timer is None:
            if self._loop.time() >= self._next_delivery:
                self._wake()
            else:
                self._timer = self._loop.call_at(self._next_delivery, self._wake)

    def fail(self, error: Exception) -> None:
        """End with an error; text that was not taken yet is still delivered before it."""
        self._error = error
        self._wake()

    async def take(self) -> TextDelta:
        """Wait for something to deliver and take all of it. Raises what fail() was given."""
        while not self._texts:
            if self._error is not None:
                raise self._error
            await self._wait()
        delay = self._next_delivery - self._loop.time()
        if delay > 0 and not self.is_closed:
            # Text came while the consumer was busy with the chunk before: it is early, not late.
            self._timer = self._loop.call_later(delay, self._wake)
            await self._wait()
        self._next_delivery = self._loop.time() + self._pacer.interval_seconds
        delta = TextDelta(
            "".join(self._texts),
            self._num_tokens,
            self._last.finish_reason if self._last else None,
            self._last.stop_reason if self._last else None,
        )
        self._texts.clear()
        self._num_tokens = 0
        return delta

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
