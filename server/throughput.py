"""The log line about throughput: every ten seconds while requests run."""

import asyncio
import logging
from collections.abc import Callable

from engine.stats import EngineStats

logger = logging.getLogger("monoloop.server")

INTERVAL_SECONDS = 10.0


class ThroughputLog:
    """Turns two snapshots of the engine's totals into a line of rates."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats
        self._last = stats()

    async def run(self) -> None:
        """Log a line every INTERVAL_SECONDS, unless the engine was idle, until cancelled."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            now = loop.time()
            if (line := self.line(now - since)) is not None:
                logger.info("%s", line)
            since = now

    def line(self, seconds: float) -> str | None:
        """Return the line about the `seconds` since the last call; None if the engine was idle."""
        last, stats = self._last, self._stats()
        self._last = stats
        generated = stats.generation_tokens_total - last.generation_tokens_total
        prompt = stats.queried_prompt_tokens_total - last.queried_prompt_tokens_total
        cached = stats.cached_prompt_tokens_total - last.cached_prompt_tokens_total
        if not (generated or prompt or stats.running or stats.waiting):
            return None
        return (
            f"{generated / seconds:,.1f} output tokens/s, {prompt / seconds:,.1f} prompt tokens/s "
            f"({cached / max(1, prompt):.0%} cached), {stats.running} running, {stats.waiting} waiting, "
            f"KV pages {stats.kv_cache_usage:.0%} used, {stats.preemptions_total - last.preemptions_total} "
            f"preemptions, device idle {stats.device_idle_share:.0%}"
        )
