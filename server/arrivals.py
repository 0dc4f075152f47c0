"""A burst of requests, let in one by one."""

import asyncio
from collections import deque

# A request costs the loop about a millisecond in a handful of turns.
REQUESTS_PER_TURN = 1


class ArrivalLimiter:
    """Lets REQUESTS_PER_TURN requests begin in one turn of the loop, in the order they came.

    The loop runs everything that is ready before it looks at the clock or at the device again, so hundreds of
    requests that arrive at once would stop all streams for as long as the first stage of all of them takes.
    That stage begins when the body is complete; those without a body (probes, metrics) do not pass here.

    The engine hands out up to MAX_DELIVERIES_AT_ONCE pieces of text in a turn, which take about as long as a
    request. So arrivals get about half of the loop while streams have text, and under a flood later requests
    wait for their first token, and running streams not for their next.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_left = REQUESTS_PER_TURN
        self._is_turning = False

    async def enter(self) -> None:
        """Return when it is this request's turn."""
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn)
        if self._num_left and not self._waiting:
            self._num_left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _turn(self) -> None:
        """A turn of the loop is over: let the next ones in."""
        self._is_turning = self._num_left < REQUESTS_PER_TURN or bool(self._waiting)
        self._num_left = REQUESTS_PER_TURN
        while self._num_left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its request was cancelled while it waited
                turn.set_result(None)
                self._num_left -= 1
        if self._is_turning:
            asyncio.get_running_loop().call_soon(self._turn)
