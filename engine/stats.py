"""What the engine reports: a snapshot of its state, observed events, and the device's idle time."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from engine.outputs import FinishReason

WINDOW_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Live counts and totals since start.

    Used pages are held by sequences, cached pages only kept for reuse. `pages_predicted` is the expected peak
    of the sequences that run now, which may exceed the pool. Constrained steps have rows with a constraint,
    such as a grammar. Drafts are guesses of next tokens that a step verified.
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
    drafts_total: int
    accepted_drafts_total: int
    device_idle_seconds_total: float
    device_idle_share: float
    loop_lag_seconds: float
    alive: bool
    draining: bool

    @property
    def num_pages(self) -> int:
        """Number of pages in the pool."""
        return self.pages_used + self.pages_cached + self.pages_free

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pool's pages that sequences hold, 0 to 1."""
        return self.pages_used / self.num_pages

    @property
    def predicted_kv_cache_usage(self) -> float:
        """Expected peak of `kv_cache_usage` if no other sequence starts; may exceed 1."""
        return self.pages_predicted / self.num_pages


class Phase(StrEnum):
    """What a sequence does. A preempted one waits to compute its tokens again, a recomputing one does so."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    RECOMPUTE = "recompute"


class SequenceView(NamedTuple):
    """A sequence as it is now. Cached tokens of its prompt were found in the prefix cache."""

    id: str
    phase: Phase
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    max_tokens: int
    pages: int
    age_seconds: float


class PageCells(NamedTuple):
    """The page pool in cells of consecutive pages: in each, how many pages are in each state.

    Used pages have one holder, shared ones several; the rest of a cell is free.
    """

    pages_per_cell: int
    used: Sequence[int]
    shared: Sequence[int]
    cached: Sequence[int]


class EngineView(NamedTuple):
    """All figures, the first sequences (running ones before waiting ones), and the pages."""

    stats: EngineStats
    sequences: Sequence[SequenceView]
    cells: PageCells


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Durations and token counts of one finished request; None for a stage it never finished.

    `arrival_seconds` is the time.perf_counter() of its arrival.
    """

    finish_reason: FinishReason
    prompt_tokens: int
    generation_tokens: int
    max_tokens: int
    preemptions: int
    end_to_end_seconds: float
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    arrival_seconds: float


class EngineObserver(Protocol):
    """Gets the engine's measurements, on the event loop. Must be quick and must not raise."""

    def step_finished(self, seconds: float, num_tokens: int, num_rows: int) -> None:
        """A step took `seconds` on the device and computed `num_tokens` of `num_rows` sequences."""

    def first_token(self, seconds: float) -> None:
        """A request got its first token `seconds` after it arrived."""

    def inter_token(self, seconds: float, num_tokens: int) -> None:
        """A request got `num_tokens` more, `seconds` after the ones before."""

    def request_finished(self, times: RequestTimes) -> None:
        """A request ended, for whatever reason."""

    def loop_lag(self, seconds: float) -> None:
        """A 10 ms timer of the event loop fired `seconds` late."""


class NullObserver:
    """An observer that ignores everything."""

    def step_finished(self, seconds: float, num_tokens: int, num_rows: int) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def inter_token(self, seconds: float, num_tokens: int) -> None: ...

    def request_finished(self, times: RequestTimes) -> None: ...

    def loop_lag(self, seconds: float) -> None: ...


class IdleMeter:
    """Measures the time the device was idle while work was waiting.

    A gap lasts from the end of a step on the device to the start of the next one; time without a queued or
    running request does not count. Times are seconds of one clock, non-decreasing.
    """

    def __init__(self, now: float) -> None:
        self.total_seconds = 0.0
        self._ready_since: float | None = None
        self._started = now
        self._gaps: deque[tuple[float, float]] = deque()
        self._window_seconds = 0.0

    def work_arrived(self, now: float) -> None:
        """A request was queued: idle time counts from now if the device had no work."""
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
        """No request is queued or running any more."""
        self._ready_since = None

    def share(self, now: float) -> float:
        """Return the idle share of the last 30 seconds, or of the time since the start, 0 to 1."""
        self._forget(now)
        return min(1.0, self._window_seconds / max(1e-9, min(WINDOW_SECONDS, now - self._started)))

    def _forget(self, now: float) -> None:
        while self._gaps and self._gaps[0][0] < now - WINDOW_SECONDS:
            self._window_seconds -= self._gaps.popleft()[1]
