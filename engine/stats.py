"""One snapshot of the engine's live state, read by /metrics, /load and the benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Live counts and totals since start. Pages used are held by sequences; cached ones only for reuse."""

    running: int
    waiting: int
    pages_used: int
    pages_cached: int
    pages_free: int
    page_size: int
    preemptions_total: int
    prompt_tokens_total: int
    cached_prompt_tokens_total: int
    generation_tokens_total: int
    steps_total: int
    device_idle_seconds_total: float
    device_idle_share: float
    loop_lag_seconds: float
    alive: bool
    draining: bool

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pool's pages that sequences hold, 0 to 1."""
        return self.pages_used / (self.pages_used + self.pages_cached + self.pages_free)
