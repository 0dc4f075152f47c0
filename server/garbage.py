"""When Python's garbage collector runs: in full while no request is open, hardly ever while some are.

Reference counts free nearly all that a request makes; only cycles wait for the collector. It is tuned for
programs whose young objects die soon. Here they live as long as their streams: with 768 of them a full
collection took 150 to 230 ms, in which it freed next to nothing, and all collections 30 % of the loop.
"""

import asyncio
import gc
from collections.abc import Callable

# Objects that may be made and not freed before a collection beside running requests: 30 to 100 MB.
MAX_NEW_OBJECTS = 200_000
# Fewer are not worth a collection, idle or not.
MIN_NEW_OBJECTS = 10_000
CHECK_SECONDS = 1.0


def collect_rarely() -> None:
    """Take all that start-up made, which stays, out of the collector's sight, and raise its thresholds.

    A full collection would walk a million objects of torch and transformers each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(MAX_NEW_OBJECTS, 10, 10)


class IdleCollector:
    """Collects when no request is open, so that cycles which rare collections leave do not pile up."""

    def __init__(self, is_idle: Callable[[], bool]) -> None:
        self._is_idle = is_idle

    async def run(self) -> None:
        """Check every CHECK_SECONDS, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self.check()

    def check(self) -> None:
        """Collect in full if no request is open and enough objects have been made since the last time."""
        num_new, num_partial, _ = gc.get_count()
        if self._is_idle() and (num_new >= MIN_NEW_OBJECTS or num_partial):
            gc.collect()
