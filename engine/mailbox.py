"""Single-slot queue between the engine and a handler; unread deltas merge."""

import asyncio
from collections.abc import Callable

from engine.outputs import TextDelta

# More unread deltas than this become one, which is smaller.
MAX_UNREAD_DELTAS = 64


class Mailbox:
    """Holds the unread deltas of one request. One producer and one consumer, both on the loop.

    The request's `max_tokens` bounds its size: a consumer that never reads costs little more than its text.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._unread: list[TextDelta] = []
        self._has_last = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[TextDelta], bool] | None = None

    @property
    def is_closed(self) -> bool:
        """True once the last delta or an error has arrived."""
        return self._has_last or self._error is not None

    def offer_to(self, take: Callable[[TextDelta], bool] | None) -> None:
        """Call `take` with each delta that comes while none is unread, and keep it only if that is False."""
        self._take = take

    def put(self, delta: TextDelta) -> None:
        """Add a delta. One with a finish reason is the last."""
        if self._take is not None and not self._unread and self._take(delta):
            return
        self._unread.append(delta)
        if delta.finish_reason is not None:
            self._has_last = True
        elif len(self._unread) > MAX_UNREAD_DELTAS:
            self._unread = [TextDelta.joined(self._unread)]
        self._wake()

    def fail(self, error: Exception) -> None:
        """End with an error; unread text is still delivered before it."""
        self._error = error
        self._wake()

    async def take(self) -> TextDelta:
        """Wait for a delta and return all that is unread as one. Raises the error given to fail()."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas, self._unread = self._unread, []
        return TextDelta.joined(deltas)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
