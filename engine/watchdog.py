"""Notices parts of the engine that have work and make no progress.

A deadline for a step would end servers that are only slow: a step of a large model on a CPU, or one that
compiles kernels, may take minutes. So time counts only while nothing at all has moved since the last check.
"""

from collections.abc import Callable, Mapping

# Time between checks. A longer gap counts as this much: the loop was busy, or the machine was suspended.
CHECK_SECONDS = 1.0

# Returns None if there is no work, else a value that differs from the last one if the work has moved.
Progress = Callable[[], object]


class Watchdog:
    """Watches named parts of the engine; call check() every CHECK_SECONDS."""

    def __init__(self, parts: Mapping[str, Progress], timeout_seconds: float) -> None:
        self._parts = parts
        self._timeout_seconds = timeout_seconds
        self._last: dict[str, object] = dict.fromkeys(parts)
        self._still_seconds = dict.fromkeys(parts, 0.0)

    def check(self) -> str | None:
        """Return the name of a part that has had work but no progress for the whole time-out, or None."""
        for name, progress in self._parts.items():
            now = progress()
            is_still = now is not None and now == self._last[name]
            self._last[name] = now
            self._still_seconds[name] = self._still_seconds[name] + CHECK_SECONDS if is_still else 0.0
            if self._still_seconds[name] >= self._timeout_seconds:
                return name
        return None
