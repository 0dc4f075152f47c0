"""Times out many things that all may take equally long, with one timer of the loop for all of them."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Deadlines(Generic[T]):
    """Calls `on_due` with each item that is not discarded within `seconds` after it was added.

    The order of adding is the order of the deadlines, so that a timer for the first is enough. A timer of the
    loop for each item costs 8 µs, an entry here 1 µs.
    """

    def __init__(self, seconds: float, on_due: Callable[[T], None]) -> None:
        self._seconds = seconds
        self._on_due = on_due
        self._added: dict[T, float] = {}  # the loop's time, the oldest first
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: T) -> None:
        """Begin to wait for an item, or begin again."""
        loop = asyncio.get_running_loop()
        self._added.pop(item, None)
        self._added[item] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._look)

    def discard(self, item: T) -> None:
        """Wait no longer for an item, if it is there."""
        self._added.pop(item, None)

    def items(self) -> Iterator[tuple[T, float]]:
        """Return the items and when they were added, the oldest first."""
        return iter(self._added.items())

    def clear(self) -> list[T]:
        """Wait for nothing any more; returns what was waited for."""
        items = list(self._added)
        self._added.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return items

    def _look(self) -> None:
        """Call what is due, and set the timer for the next."""
        loop = asyncio.get_running_loop()
        self._timer = None
        now = loop.time()
        while self._added:
            item, added = next(self.items())
            if added + self._seconds > now:
                self._timer = loop.call_at(added + self._seconds, self._look)
                return
            del self._added[item]
            self._on_due(item)
