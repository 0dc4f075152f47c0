"""A burst of requests, let in a few at a time, and one at a time while streams have text to deliver."""

import asyncio
from collections import deque
from collections.abc import Callable

# A request costs the loop about a millisecond in a handful of turns.
REQUESTS_PER_TURN = 4


class ArrivalLimiter:
    """Lets requests begin in the order they came, at most REQUESTS_PER_TURN in one turn of the loop.

    The loop runs everything that is ready before it looks at the clock or at the device again, so hundreds of
    requests that arrive at once would stop all streams for as long as the first stage of all of them takes.
    That stage begins when the body is complete; those without a body (probes, metrics) do not pass here.

    While text waits for its delivery, `is_delivering`, one request begins per turn, beside the
    MAX_DELIVERIES_AT_ONCE pieces of text of that turn: about half of the loop's time each. A flood then
    lengthens the time to the first token of later requests, and not the gaps between the tokens of streams.
    """

    def __init__(self, is_delivering: Callable[[], bool] = lambda: False) -> None:
        self._is_delivering = is_delivering
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_begun = 0  # in this turn
        self._is_turning = False

    async def enter(self) -> None:
        """Return when it is this request's turn."""
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn)
        if not self._waiting and self._num_begun < self._limit():
            self._num_begun += 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _limit(self) -> int:
        return 1 if self._is_delivering() else REQUESTS_PER_TURN

    def _turn(self) -> None:
        """A turn of the loop is over: let the next ones in."""
        self._is_turning = self._num_begun > 0 or bool(self._waiting)
        self._num_begun = 0
        limit = self._limit()
        while self._num_begun < limit and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its request was cancelled while it waited
                turn.set_result(None)
                self._num_begun += 1
        if self._is_turning:
            asyncio.get_running_loop().call_soon(self._turn)
