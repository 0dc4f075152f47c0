"""Single-slot queue between the engine and a handler; unread deltas merge."""

import asyncio

from engine.outputs import OutputToken, TextDelta


class Mailbox:
    """Holds all unread deltas of one request as one. One producer and one consumer, both on the loop.

    The request's `max_tokens` bounds its size: a consumer that never reads costs one string.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._texts: list[str] = []
        self._num_tokens = 0
        self._tokens: list[OutputToken] = []
        self._prompt_tokens: tuple[OutputToken, ...] = ()
        self._last: TextDelta | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_closed(self) -> bool:
        """True once the last delta or an error has arrived."""
        return self._last is not None or self._error is not None

    def put(self, delta: TextDelta) -> None:
        """Add a delta. One with a finish reason is the last."""
        self._texts.append(delta.text)
        self._num_tokens += delta.num_tokens
        if delta.tokens:
            self._tokens += delta.tokens
        if delta.prompt_tokens:
            self._prompt_tokens = delta.prompt_tokens
        if delta.finish_reason is not None:
            self._last = delta
        self._wake()

    def fail(self, error: Exception) -> None:
        """End with an error; unread text is still delivered before it."""
        self._error = error
        self._wake()

    async def take(self) -> TextDelta:
        """Wait for a delta and return all that is unread as one. Raises the error given to fail()."""
        while not self._texts:
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        delta = TextDelta(
            "".join(self._texts),
            self._num_tokens,
            self._last.finish_reason if self._last else None,
            self._last.stop_reason if self._last else None,
            tuple(self._tokens),
            self._prompt_tokens,
        )
        self._texts.clear()
        self._tokens.clear()
        self._prompt_tokens = ()
        self._num_tokens = 0
        return delta

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
