"""The stream that submit() returns: the deltas of one request in order, and its token counts."""

from collections.abc import AsyncIterator, Callable
from typing import Any, Self

from engine.errors import EngineError
from engine.mailbox import Mailbox
from engine.outputs import TextDelta
from engine.readouts import Readout
from engine.stats import RequestTimes


class RequestStream:
    """Async iterator over a request's TextDeltas; the one with a finish reason is the last.

    Iterating raises StepFailed, Draining or EngineDead if the request ended by a fault. The counts are final
    after the last delta, and so are the results of the request's readouts that do not come in parts.
    """

    def __init__(
        self,
        request_id: str,
        num_prompt_tokens: int,
        mailbox: Mailbox,
        *,
        abort: Callable[[], None],
        on_collect: Callable[[], None],
    ) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_reasoning_tokens = 0
        self.ttft_seconds: float | None = None  # from its arrival to its first token
        self.decode_seconds = 0.0  # from its first token to its last so far
        self._readouts: dict[type[Readout], Any] = {}
        self._mailbox = mailbox
        self._abort = abort
        self._on_collect = on_collect
        self._is_exhausted = False
        self._times: RequestTimes | None = None
        self._on_end: Callable[[RequestTimes], None] | None = None

    def add_readout(self, readout: Readout, result: Any) -> None:
        """Keep the result of a readout."""
        self._readouts[type(readout)] = result

    def readout(self, kind: type[Readout]) -> Any:
        """Return the result of the request's readout of this class, after the last delta.

        Raises KeyError if the request has none, or ended before it was computed.
        """
        return self._readouts[kind]

    def abort(self) -> None:
        """Stop computing, and free all memory within a step. Does nothing after the end."""
        self._abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Abort, for a reader that leaves before the end."""
        self.abort()

    def end(self, times: RequestTimes) -> None:
        """The request has ended, for whatever reason."""
        self._times = times
        if self._on_end is not None:
            self._on_end(times)

    def when_ended(self, take: Callable[[RequestTimes], None]) -> None:
        """Call `take` with the request's times, now if it has ended, else at its end. It must not raise.

        An aborted request ends within a step. Streams of a beam search have no times.
        """
        if self._times is None:
            self._on_end = take
        else:
            take(self._times)

    def offer_to(self, take: Callable[[TextDelta], bool] | None) -> None:
        """Call `take` with each delta as it comes, if all before it were read; None ends that.

        A delta for which it returns False is iterated over as usual. It must not raise.
        """
        self._mailbox.offer_to(take)

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        return self

    async def __anext__(self) -> TextDelta:
        """Wait for new text and return all of it."""
        if self._is_exhausted:
            raise StopAsyncIteration
        try:
            delta = await self._mailbox.take()
        except EngineError:
            self._is_exhausted = True
            raise
        self._is_exhausted = delta.finish_reason is not None
        return delta

    async def collect(self) -> TextDelta:
        """Wait for the end and return the output as one delta; abort if the caller is cancelled."""
        self._on_collect()
        try:
            return TextDelta.joined([delta async for delta in self])
        finally:
            self.abort()
