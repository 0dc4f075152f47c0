"""The log line about throughput, from two snapshots of the engine's totals."""

from dataclasses import replace

from engine.stats import EngineStats
from server.throughput import ThroughputLog
from tests.server.fake_engine import FakeEngine


class Totals:
    """Snapshots that a test changes."""

    def __init__(self) -> None:
        self.stats = FakeEngine().stats()

    def __call__(self) -> EngineStats:
        return self.stats


async def test_a_busy_interval_has_a_line_with_rates() -> None:
    totals = Totals()
    log = ThroughputLog(totals)
    totals.stats = replace(
        totals.stats,
        generation_tokens_total=1234,
        queried_prompt_tokens_total=400,
        cached_prompt_tokens_total=100,
        running=3,
        waiting=2,
        pages_used=250,
        pages_free=750,
        preemptions_total=1,
        device_idle_share=0.05,
    )
    assert log.line(10.0) == (
        "123.4 output tokens/s, 40.0 prompt tokens/s (25% cached), 3 running, 2 waiting, KV pages 25% used, "
        "1 preemptions, device idle 5%"
    )
    line = log.line(10.0)
    assert line is not None and line.startswith("0.0 output tokens/s"), "requests run, but none got a token"


async def test_an_idle_interval_has_no_line() -> None:
    totals = Totals()
    log = ThroughputLog(totals)
    assert log.line(10.0) is None
    totals.stats = replace(totals.stats, generation_tokens_total=5)
    assert log.line(10.0) is not None, "a request came and ended"
    assert log.line(10.0) is None
