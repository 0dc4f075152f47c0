"""When Python's garbage collector runs: in full while no request is open, hardly ever while some are.

Reference counts free nearly all that a request makes; only cycles wait for the collector. It is tuned for
programs whose young objects die soon. Here they live as long as their streams: with 768 of them a full
collection took 150 to 230 ms, in which it freed next to nothing, and all collections 30 % of the loop.
"""

import asyncio
import gc
from collections.abc import Callable

from engine.machine import trim_heap

# Objects that may be made and not freed before a collection beside running requests: 30 to 100 MB.
MAX_NEW_OBJECTS = 200_000
# Fewer are not worth a collection, idle or not.
MIN_NEW_OBJECTS = 10_000
CHECK_SECONDS = 1.0
TRIM_AFTER_CHECKS = 10


def collect_rarely() -> None:
    """Take all that start-up made, which stays, out of the collector's sight, and raise its thresholds.

    A full collection would walk a million objects of torch and transformers each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(MAX_NEW_OBJECTS, 10, 10)


class IdleCollector:
    """Collects when no request is open, so that cycles which rare collections leave do not pile up.

    Some seconds later it returns the C library's freed memory to the system. Not at once: the next step would
    have to map its memory anew, page by page.
    """

    def __init__(self, is_idle: Callable[[], bool]) -> None:
        self._is_idle = is_idle
        self._num_idle_checks = TRIM_AFTER_CHECKS  # start-up has returned what it freed

    async def run(self) -> None:
        """Check every CHECK_SECONDS, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if self.check():
                await asyncio.to_thread(trim_heap)

    def check(self) -> bool:
        """Collect in full if no request is open and enough objects have been made since the last time.

        Return True, once in an idle time, if freed memory should be returned now.
        """
        if not self._is_idle():
            self._num_idle_checks = 0
            return False
        num_new, num_partial, _ = gc.get_count()
        if num_new >= MIN_NEW_OBJECTS or num_partial:
            gc.collect()
            self._num_idle_checks = 0
        self._num_idle_checks += 1
        return self._num_idle_checks == TRIM_AFTER_CHECKS
