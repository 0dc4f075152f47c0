"""The device thread: order, faults, and when the loop stands aside for a launch."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from engine.device.thread import DeviceThread
from engine.outputs import StepOutput, StepPlan


class Step:
    is_done = True

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id

    def wait(self) -> StepOutput:
        return StepOutput(self.step_id, [], 0.0, 0.0)


class RecordingRunner:
    """Notes the steps it has launched."""

    def __init__(self, *, is_asynchronous: bool, before: Callable[[], None] = lambda: None) -> None:
        self.is_asynchronous = is_asynchronous
        self.before = before
        self.launched: list[int] = []

    def launch(self, plan: StepPlan, *others: object) -> Step:
        self.before()
        self.launched.append(plan.step_id)
        return Step(plan.step_id)


def launch(thread: DeviceThread, step_id: int) -> asyncio.Future[StepOutput]:
    """Launch a step; returns a future of its output."""
    future: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()

    def on_done(result: StepOutput | Exception) -> None:
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    thread.launch(StepPlan.of(step_id, []), on_done)
    return future


@asynccontextmanager
async def thread_around(runner: RecordingRunner) -> AsyncIterator[DeviceThread]:
    thread = DeviceThread(run_ahead=1)
    await thread.start(lambda: runner)
    try:
        yield thread
    finally:
        await thread.stop()


async def test_the_loop_goes_on_when_a_queued_step_is_launched(monkeypatch) -> None:
    monkeypatch.setattr("engine.device.thread.MAX_PAUSE_SECONDS", 10)
    runner = RecordingRunner(is_asynchronous=True)
    async with thread_around(runner) as thread:
        for step_id in range(50):
            future = launch(thread, step_id)
            assert runner.launched[-1:] == [step_id], "the loop did not stand aside for the launch"
            assert (await future).step_id == step_id
    assert runner.launched == list(range(50))


async def test_a_launch_that_takes_long_does_not_hold_the_loop_up(monkeypatch) -> None:
    monkeypatch.setattr("engine.device.thread.MAX_PAUSE_SECONDS", 0.001)
    waits: list[bool] = []
    release = threading.Event()
    runner = RecordingRunner(is_asynchronous=True, before=lambda: waits.append(release.wait(10)))
    async with thread_around(runner) as thread:
        future = launch(thread, 0)
        assert not runner.launched, "launch() came back before the step was launched"
        release.set()
        assert (await future).step_id == 0
    assert waits == [True]


async def test_nobody_waits_for_a_runner_that_computes(monkeypatch) -> None:
    """On a CPU a launch is the whole step; the loop goes on at once, whatever the thread does."""
    monkeypatch.setattr("engine.device.thread.MAX_PAUSE_SECONDS", 10)
    waits: list[bool] = []
    loop_went_on = threading.Event()
    # Shorter than the loop would stand still.
    runner = RecordingRunner(is_asynchronous=False, before=lambda: waits.append(loop_went_on.wait(5)))
    async with thread_around(runner) as thread:
        future = launch(thread, 0)
        loop_went_on.set()
        assert (await future).step_id == 0
    assert waits == [True], "the loop waited for the step to be computed"


async def test_nobody_stands_aside_for_a_launch_that_waits_for_tokens(monkeypatch) -> None:
    """It waits for the steps before, not for the GIL."""
    monkeypatch.setattr("engine.device.thread.MAX_PAUSE_SECONDS", 10.0)
    loop_went_on = threading.Event()
    found: list[bool] = []

    class WaitingRunner(RecordingRunner):
        def launch(self, plan: StepPlan, on_wait: Callable[[], None] = lambda: None) -> Step:
            if plan.step_id == 0:
                on_wait()
                found.append(loop_went_on.wait(10))
            return super().launch(plan)

    runner = WaitingRunner(is_asynchronous=True)
    async with thread_around(runner) as thread:
        first = launch(thread, 0)
        second = launch(thread, 1)  # while the first still waits
        loop_went_on.set()
        assert [(await first).step_id, (await second).step_id] == [0, 1]
    assert found == [True], "the loop stood still until the first launch gave up"


@pytest.mark.parametrize("is_asynchronous", [True, False])
async def test_a_launch_that_raises_fails_its_step_alone(is_asynchronous: bool) -> None:
    faults = iter([False, True, False])

    def fail_sometimes() -> None:
        if next(faults):
            raise RuntimeError("no")

    runner = RecordingRunner(is_asynchronous=is_asynchronous, before=fail_sometimes)
    async with thread_around(runner) as thread:
        futures = [launch(thread, step_id) for step_id in range(3)]
        thread.flush()
        results = await asyncio.gather(*futures, return_exceptions=True)
    assert [getattr(result, "step_id", None) for result in results] == [0, None, 2]
    assert isinstance(results[1], RuntimeError)
