"""The one thread that touches the device.

The loop hands it plans. It launches them in order, and awaits a step once more than `run_ahead` later ones
are launched. A thread of its own, because each torch call releases the GIL and must win it back: a loop that
launched steps itself left the device idle half of the time. For the same reason the loop pauses while a step
is launched: beside a busy loop a launch of 0.4 ms took 2 ms, and one of 9 ms took 250 ms.
"""

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol, TypeVar

from engine.outputs import StepOutput, StepPlan

# The loop pauses no longer than this for one launch.
MAX_PAUSE_SECONDS = 0.005


class LaunchedStep(Protocol):
    """A step that was launched."""

    @property
    def is_done(self) -> bool:
        """Return True if wait() returns at once."""

    def wait(self) -> StepOutput:
        """Block until the step is done. Raises if it failed."""


class Runner(Protocol):
    """Computes steps; ModelRunner is the real one."""

    is_asynchronous: bool  # launch() queues a step, and does not compute it

    def launch(self, plan: StepPlan, on_wait: Callable[[], None] = ...) -> LaunchedStep:
        """Queue a step on the device (or compute it). Raises if it cannot.

        `on_wait` is called when it has to wait for the tokens of the steps before: they can be read first.
        """


R = TypeVar("R", bound=Runner)
T = TypeVar("T")
# Gets the output of a step, or what it raised, on the loop. A panic of a library in Rust is no Exception.
OnStep = Callable[[StepOutput | BaseException], None]


class DeviceThread:
    """Runs a Runner. All methods are called on the loop; none blocks it for long."""

    def __init__(self, run_ahead: int) -> None:
        self._run_ahead = run_ahead
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._runner: Runner | None = None
        self._launched: deque[tuple[LaunchedStep, OnStep]] = deque()
        self._is_waiting = False  # a launch waits for tokens: written on the thread, read on the loop
        self._num_begun = 0  # jobs, counted on the thread
        self._num_seen = 0  # of them, at the last call of progress()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    async def start(self, make_runner: Callable[[], R]) -> R:
        """Build the runner on the thread. Raises what that raises."""
        runner = await self.call(make_runner)
        self._runner = runner
        return runner

    async def call(self, function: Callable[[], T]) -> T:
        """Return what a function returns on the thread, after the jobs before it. Raises what that raises."""
        future: asyncio.Future[T] = self._loop.create_future()

        def job() -> None:
            try:
                result = function()
            except BaseException as error:
                self._loop.call_soon_threadsafe(_set_exception, future, error)
                return
            self._loop.call_soon_threadsafe(_set_result, future, result)

        self._jobs.put(job)
        return await future

    def launch(self, plan: StepPlan, on_done: OnStep) -> None:
        """Queue a step after those before it; `on_done` is called in the order of the steps.

        It is no future: the task that awaits one runs an iteration of the loop later than a callback.
        """
        assert self._runner is not None
        has_launched = threading.Event()
        self._jobs.put(lambda: self._launch(plan, on_done, has_launched.set))
        if self._runner.is_asynchronous and not self._is_waiting:
            has_launched.wait(MAX_PAUSE_SECONDS)

    def flush(self) -> None:
        """Await every launched step, because no plan follows for now."""
        self._jobs.put(lambda: self._collect(0))

    @property
    def is_alive(self) -> bool:
        """False once the thread has ended."""
        return self._thread.is_alive()

    @property
    def num_jobs(self) -> int:
        """The jobs begun so far: steps, and what is called between them."""
        return self._num_begun

    def progress(self) -> object:
        """Return a value that is another one if the thread has moved since the last call.

        It has if it began a job or called a Python function, as it does for each op of a step, and for each
        stage of a compiler. The frame of the innermost function shows that, at no cost for the steps. It is
        part of the value, which keeps its variables alive; so jobs shorter than the time between two calls
        are only counted.
        """
        is_same_job, self._num_seen = self._num_begun == self._num_seen, self._num_begun
        ident = self._thread.ident or 0
        return self._num_seen, sys._current_frames().get(ident) if is_same_job else None

    async def stop(self) -> None:
        """End the thread after what is queued."""
        self._jobs.put(lambda: self._collect(0))
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._num_begun += 1
            job()

    def _launch(self, plan: StepPlan, on_done: OnStep, has_launched: Callable[[], None]) -> None:
        assert self._runner is not None

        def give_out() -> None:
            self._is_waiting = True
            has_launched()
            self._collect(0)

        try:
            step = self._runner.launch(plan, give_out)
        except BaseException as error:
            self._is_waiting = False
            has_launched()
            # Steps launched before it are still good, and their results come first.
            self._collect(0)
            self._loop.call_soon_threadsafe(on_done, error)
            return
        self._is_waiting = False
        has_launched()
        self._launched.append((step, on_done))
        self._collect(self._run_ahead)

    def _collect(self, num_left: int) -> None:
        """Wait for the oldest steps until `num_left` are left, and for those that are done anyway."""
        while self._launched and (len(self._launched) > num_left or self._launched[0][0].is_done):
            step, on_done = self._launched.popleft()
            result: StepOutput | BaseException
            try:
                result = step.wait()
            except BaseException as error:
                result = error
            self._loop.call_soon_threadsafe(on_done, result)


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
