"""What watchers of the engine see: a few snapshots a second, each made once for all of them.

The feed works only while there are watchers. One that reads slowly misses events and delays no other.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from engine.stats import EngineStats, EngineView, PageCells
from server.errors import TooManyWatchers
from server.metrics import Histogram
from server.schema.live import LivePages, LiveSequence, LiveStats, LiveTimes, LiveTotals

INTERVAL_SECONDS = 0.25
MAX_WATCHERS = 16
MAX_SEQUENCES = 64
MAX_CELLS = 1024

Watcher = asyncio.Queue[bytes | None]


class Watched(Protocol):
    """What the feed asks of an engine."""

    def stats(self) -> EngineStats:
        """Return a snapshot of live state."""

    def view(self, max_sequences: int, max_cells: int) -> EngineView:
        """Return a snapshot with sequences and pages."""


class Observed(NamedTuple):
    """Values that a histogram observed."""

    mean: float
    largest: float


class Recent:
    """What a histogram observed since the last call of take()."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._count, self._total = 0, 0.0
        self.take()

    def take(self) -> Observed | None:
        """Return mean and largest value, or None if there was none, and begin anew."""
        histogram, last_count, last_total = self._histogram, self._count, self._total
        self._count, self._total = sum(histogram.counts), histogram.total
        largest, histogram.largest = histogram.largest, 0.0
        if self._count == last_count:
            return None
        return Observed((self._total - last_total) / (self._count - last_count), largest)

    def take_times(self) -> LiveTimes | None:
        """Call take(), for a histogram of seconds."""
        observed = self.take()
        if observed is None:
            return None
        return LiveTimes(mean_seconds=observed.mean, largest_seconds=observed.largest)


class Interval:
    """Makes events out of snapshots of an engine: its state, and what happened since the event before."""

    def __init__(
        self, engine: Watched, histogram: Callable[[str], Histogram], model: str, now: float
    ) -> None:
        self._engine = engine
        self._model = model
        self._ttft, self._itl = Recent(histogram("ttft")), Recent(histogram("inter_token"))
        self._step, self._step_tokens = Recent(histogram("step_seconds")), Recent(histogram("step_tokens"))
        self._lag = Recent(histogram("loop_lag"))
        self._last, self._since = engine.stats(), now

    def event(self, now: float) -> LiveStats:
        """Return the event about the time since the last call."""
        view = self._engine.view(MAX_SEQUENCES, MAX_CELLS)
        last, stats, seconds = self._last, view.stats, now - self._since
        self._last, self._since = stats, now
        output_tokens = stats.generation_tokens_total - last.generation_tokens_total
        prompt_tokens = stats.queried_prompt_tokens_total - last.queried_prompt_tokens_total
        idle_seconds = stats.device_idle_seconds_total - last.device_idle_seconds_total
        step_tokens = self._step_tokens.take()
        return LiveStats(
            model=self._model,
            interval_seconds=seconds,
            running=stats.running,
            waiting=stats.waiting,
            draining=stats.draining,
            output_tokens_per_second=output_tokens / seconds,
            prompt_tokens_per_second=prompt_tokens / seconds,
            ttft=self._ttft.take_times(),
            itl=self._itl.take_times(),
            step=self._step.take_times(),
            loop_lag=self._lag.take_times(),
            tokens_per_step=None if step_tokens is None else step_tokens.mean,
            device_idle_share=min(1.0, idle_seconds / seconds),
            totals=totals_of(stats),
            pages=pages_of(stats, view.cells),
            sequences=[LiveSequence(**sequence._asdict()) for sequence in view.sequences],
        )


def totals_of(stats: EngineStats) -> LiveTotals:
    """Return the totals of a snapshot."""
    return LiveTotals(
        prompt_tokens=stats.queried_prompt_tokens_total,
        cached_prompt_tokens=stats.cached_prompt_tokens_total,
        output_tokens=stats.generation_tokens_total,
        steps=stats.steps_total,
        preemptions=stats.preemptions_total,
        evicted_pages=stats.evicted_pages_total,
        drafts=stats.drafts_total,
        accepted_drafts=stats.accepted_drafts_total,
    )


def pages_of(stats: EngineStats, cells: PageCells) -> LivePages:
    """Return the page pool of a snapshot."""
    size = cells.pages_per_cell
    counts = zip(cells.used, cells.shared, cells.cached, strict=True)
    digits = [f"{-(-15 * count // size):x}" for count in range(size + 1)]
    return LivePages(
        page_size=stats.page_size,
        used=stats.pages_used,
        shared=sum(cells.shared),
        cached=stats.pages_cached,
        free=stats.pages_free,
        predicted=stats.pages_predicted,
        pages_per_cell=size,
        cells="".join([digits[count] for cell in counts for count in cell]),
    )


class LiveFeed:
    """Sends every watcher the same events. Lives on the event loop."""

    def __init__(self, interval: Callable[[], Interval], is_over: Callable[[], bool]) -> None:
        """`interval` begins the first event; the last one comes when `is_over`."""
        self._interval = interval
        self._is_over = is_over
        self._watchers: set[Watcher] = set()
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watch(self) -> Iterator[Watcher]:
        """A queue that gets each event, and None after the last one, until the block ends.

        Raises TooManyWatchers.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            raise TooManyWatchers(f"{MAX_WATCHERS} watch the engine already, and no more may.")
        watcher: Watcher = asyncio.Queue()
        self._watchers.add(watcher)
        if self._task is None:
            self._task = asyncio.create_task(self._run(self._interval()), name="live feed")
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if not self._watchers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _run(self, interval: Interval) -> None:
        try:
            is_over = False
            while not is_over:
                await asyncio.sleep(INTERVAL_SECONDS)
                is_over = self._is_over()
                event = interval.event(time.perf_counter()).model_dump_json()
                self._send(b"data: %b\n\n" % event.encode())
        finally:
            if self._task is asyncio.current_task():  # it was not cancelled for lack of watchers
                self._task = None
                self._send(None)

    def _send(self, event: bytes | None) -> None:
        for watcher in self._watchers:
            if event is not None and not watcher.empty():
                watcher.get_nowait()  # the event before, which it has not read
            watcher.put_nowait(event)
