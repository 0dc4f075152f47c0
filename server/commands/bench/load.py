"""Runs the jobs: a fixed number of streams at a time, or each at its arrival time."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from server.commands.bench.client import Client, Result
from server.commands.bench.workload import Job

LAG_TIMER_SECONDS = 0.010


@dataclass(slots=True)
class Run:
    """All that was seen from here: results in order of their end, and how late our own loop was."""

    results: list[Result] = field(default_factory=list)
    client_lag_seconds: list[float] = field(default_factory=list)
    elapsed_seconds: float = 0.0


async def drive(
    client: Client,
    jobs: list[Job],
    concurrency: int | None,
    on_result: Callable[[Result], None] = lambda _: None,
) -> Run:
    """Send every job; with `concurrency` as streams become free, without it each at its arrival time."""
    run = Run()

    async def send(job: Job) -> None:
        result = await client.stream(job)
        run.results.append(result)
        on_result(result)

    async def worker() -> None:
        while waiting:
            await send(waiting.pop())

    async def at_arrival(job: Job) -> None:
        await asyncio.sleep(start + job.arrival_seconds - time.perf_counter())
        await send(job)

    lag_timer = asyncio.create_task(_measure_lag(run.client_lag_seconds))
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        if concurrency is None:
            for job in jobs:
                group.create_task(at_arrival(job))
        else:
            waiting = jobs[::-1]
            for _ in range(min(concurrency, len(jobs))):
                group.create_task(worker())
    run.elapsed_seconds = time.perf_counter() - start
    lag_timer.cancel()
    with suppress(asyncio.CancelledError):
        await lag_timer
    return run


async def _measure_lag(lags: list[float]) -> None:
    """Note how late a 10 ms timer of this process comes: that much of a latency may be our own."""
    while True:
        due = time.perf_counter() + LAG_TIMER_SECONDS
        await asyncio.sleep(LAG_TIMER_SECONDS)
        lags.append(max(0.0, time.perf_counter() - due))
