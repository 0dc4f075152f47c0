"""Counts what the engine does, and takes snapshots of its state."""

from engine.outputs import StepOutput, StepPlan
from engine.schedule.scheduler import Scheduler
from engine.stats import EngineStats, IdleMeter


class Counters:
    """Totals since the start, idle time of the device, last loop lag. Clock: time.perf_counter()."""

    def __init__(self, now: float) -> None:
        self.idle_meter = IdleMeter(now)
        self.loop_lag_seconds = 0.0
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_corrupted = 0
        self._num_steps = 0
        self._num_mixed_steps = 0
        self._num_constrained_steps = 0

    def step(self, plan: StepPlan, output: StepOutput) -> None:
        """A step is complete."""
        self._num_steps += 1
        self._num_mixed_steps += 0 < plan.num_decode_rows < plan.num_rows
        self._num_constrained_steps += bool(output.num_constrained)
        self.idle_meter.step(output.start_seconds, output.end_seconds)

    def snapshot(self, scheduler: Scheduler, now: float, *, alive: bool, draining: bool) -> EngineStats:
        """Return all figures as they are now."""
        pool = scheduler.pool
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            pages_used=pool.num_used,
            pages_cached=pool.num_cached,
            pages_predicted=scheduler.predicted_peak,
            pages_free=pool.num_free,
            page_size=pool.page_size,
            preemptions_total=scheduler.num_preemptions,
            prompt_tokens_total=self.num_prompt_tokens,
            queried_prompt_tokens_total=scheduler.num_queried_tokens,
            cached_prompt_tokens_total=scheduler.num_cached_tokens,
            evicted_pages_total=scheduler.prefix_cache.num_evicted_pages,
            generation_tokens_total=self.num_generation_tokens,
            steps_total=self._num_steps,
            mixed_steps_total=self._num_mixed_steps,
            constrained_steps_total=self._num_constrained_steps,
            corrupted_requests_total=self.num_corrupted,
            drafts_total=scheduler.num_drafts,
            accepted_drafts_total=scheduler.num_accepted_drafts,
            device_idle_seconds_total=self.idle_meter.total_seconds,
            device_idle_share=self.idle_meter.share(now),
            loop_lag_seconds=self.loop_lag_seconds,
            alive=alive,
            draining=draining,
        )
