"""How well the device is used and how late the loop runs."""

from collections import deque

WINDOW_SECONDS = 30.0


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
