"""What the engine reports: a snapshot of its state, observed events, and the device's idle time."""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from engine.outputs import FinishReason

WINDOW_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Live counts and totals since start.

    Pages used are held by sequences; cached ones only for reuse. `pages_predicted`: what runs now is expected
    to hold so many at most, which may be more than there are. Constrained steps have rows whose tokens a
    grammar, or the like, restricts by the tokens before.
    """

    running: int
    waiting: int
    pages_used: int
    pages_cached: int
    pages_predicted: int
    pages_free: int
    page_size: int
    preemptions_total: int
    prompt_tokens_total: int
    queried_prompt_tokens_total: int
    cached_prompt_tokens_total: int
    evicted_pages_total: int
    generation_tokens_total: int
    steps_total: int
    mixed_steps_total: int
    constrained_steps_total: int
    corrupted_requests_total: int
    device_idle_seconds_total: float
    device_idle_share: float
    loop_lag_seconds: float
    alive: bool
    draining: bool

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.pages_used + self.pages_cached + self.pages_free

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pool's pages that sequences hold, 0 to 1."""
        return self.pages_used / self.num_pages

    @property
    def predicted_kv_cache_usage(self) -> float:
        """The same at its expected peak, if nothing else starts; may be above 1."""
        return self.pages_predicted / self.num_pages


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """The life of one finished request, in seconds and tokens; None for a stage it never reached."""

    finish_reason: FinishReason
    prompt_tokens: int
    generation_tokens: int
    max_tokens: int
    preemptions: int
    end_to_end_seconds: float
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None


class EngineObserver(Protocol):
    """Gets the engine's events, on the event loop. Must be quick and must not raise."""

    def step_finished(self, seconds: float, num_tokens: int, num_rows: int) -> None:
        """A step took `seconds` on the device and computed `num_tokens` of `num_rows` sequences."""

    def first_token(self, seconds: float) -> None:
        """A request got its first token `seconds` after it arrived."""

    def inter_token(self, seconds: float, num_tokens: int) -> None:
        """A request got `num_tokens` more, `seconds` after the ones before."""

    def request_finished(self, times: RequestTimes) -> None:
        """A request ended, for whatever reason."""

    def loop_lag(self, seconds: float) -> None:
        """A 10 ms timer of the event loop came `seconds` late."""


class NullObserver:
    """Observes nothing."""

    def step_finished(self, seconds: float, num_tokens: int, num_rows: int) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def inter_token(self, seconds: float, num_tokens: int) -> None: ...

    def request_finished(self, times: RequestTimes) -> None: ...

    def loop_lag(self, seconds: float) -> None: ...


class IdleMeter:
    """Time the device stood still while work was waiting.

    A gap is the time between the end of a step on the device and the start of the next one; time in which
    no request was queued or running does not count. Times are seconds of one clock, non-decreasing.
    """

    def __init__(self, now: float) -> None:
        self.total_seconds = 0.0
        self._ready_since: float | None = None
        self._started = now
        self._gaps: deque[tuple[float, float]] = deque()
        self._window_seconds = 0.0

    def work_arrived(self, now: float) -> None:
        """A request was queued; counts from now if the device had nothing to do."""
        if self._ready_since is None:
            self._ready_since = now

    def step(self, start: float, end: float) -> None:
        """A step ran on the device from `start` to `end`."""
        if self._ready_since is not None:
            gap = max(0.0, start - self._ready_since)
            self.total_seconds += gap
            self._gaps.append((end, gap))
            self._window_seconds += gap
        self._ready_since = end
        self._forget(end)

    def work_ended(self) -> None:
        """Nothing is queued or running any more."""
        self._ready_since = None

    def share(self, now: float) -> float:
        """Idle share of the last 30 seconds (or of the time since start), 0 to 1."""
        self._forget(now)
        return min(1.0, self._window_seconds / max(1e-9, min(WINDOW_SECONDS, now - self._started)))

    def _forget(self, now: float) -> None:
        while self._gaps and self._gaps[0][0] < now - WINDOW_SECONDS:
            self._window_seconds -= self._gaps.popleft()[1]
