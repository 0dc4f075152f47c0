"""Limits of each API key: requests at once, requests and tokens a minute. Beyond them requests get 429."""

import math
import time
from collections.abc import Callable, Collection, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from server.answer import Answer
from server.config import ServerConfig
from server.context import ServerContext
from server.errors import KeyLimitReached
from server.open_requests import API_KEY

BUSY_SECONDS = 1  # until a client asks again that has too many requests at once
Clock = Callable[[], float]


class TokenBucket:
    """An amount that grows by `per_minute` a minute, up to as much. It may be taken into debt."""

    def __init__(self, per_minute: int, clock: Clock = time.monotonic) -> None:
        self._most = float(per_minute)
        self._clock = clock
        self._level = self._most
        self._seen_at = clock()

    def take(self, amount: int) -> None:
        """Take an amount, whatever is left."""
        self._fill()
        self._level -= amount

    def seconds_left(self) -> float:
        """Return the seconds until 1 can be taken without debt; 0 if it can be now."""
        self._fill()
        return max(0.0, (1 - self._level) * 60 / self._most)

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self._most, self._level + (now - self._seen_at) * self._most / 60)
        self._seen_at = now


class Allowance:
    """Counts what one key uses, and refuses what exceeds its limits."""

    def __init__(self, config: ServerConfig, clock: Clock = time.monotonic) -> None:
        self._most_running = config.key_requests
        self._num_running = 0
        self._requests, self._tokens = (
            None if per_minute is None else TokenBucket(per_minute, clock)
            for per_minute in (config.key_requests_per_minute, config.key_tokens_per_minute)
        )

    def begin(self) -> None:
        """Count a request that begins. Raises KeyLimitReached, and then counts nothing."""
        if self._most_running is not None and self._num_running >= self._most_running:
            raise KeyLimitReached(f"{self._most_running} requests at once", BUSY_SECONDS)
        for bucket, limit in ((self._requests, "requests a minute"), (self._tokens, "tokens a minute")):
            if bucket is not None and (seconds := bucket.seconds_left()):
                raise KeyLimitReached(limit, math.ceil(seconds))
        if self._requests is not None:
            self._requests.take(1)
        self._num_running += 1

    def end(self, answer: Answer | None) -> None:
        """Count the end of a request, and the tokens of its answer, those of the prompt among them."""
        self._num_running -= 1
        if self._tokens is not None and answer is not None:
            counts = answer.counts()
            self._tokens.take(counts.prompt + counts.completion)


class KeyLimits:
    """Refuses requests of a key beyond its limits; without keys all clients share one allowance.

    Only POST to `paths` asks the model for work. `ApiKeys` says which of the keys a request has.
    """

    def __init__(
        self,
        app: ASGIApp,
        context: ServerContext,
        allowances: Sequence[Allowance],
        paths: Collection[str],
    ) -> None:
        self.app = app
        self.context = context
        self.paths = paths
        self.allowances = allowances

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self.paths:
            await self.app(scope, receive, send)
            return
        state = scope["state"]
        allowance = self.allowances[state.get(API_KEY, 0)]
        try:
            allowance.begin()
        except KeyLimitReached as error:
            await self.context.error_response(error, scope)(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        finally:
            allowance.end(state.get("answer"))
