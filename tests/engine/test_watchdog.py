"""Stuck and dead threads: the engine ends, its requests with an error that names the reason."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine import Engine
from engine.errors import Draining, EngineDead, QueueTimeout, StepFailed
from engine.request import Request, SamplingParams
from engine.text.tokenizer_pool import TokenizerPool
from engine.watchdog import Watchdog
from tests.engine.toy import reference
from tests.engine.toy_engine import idle, to_text, toy_engine

TIMEOUT = 3.0  # that many checks


@pytest.fixture(autouse=True)
def no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the checks to the tests."""
    monkeypatch.setattr("engine.engine.CHECK_SECONDS", 3600)


@asynccontextmanager
async def engine_around(release: threading.Event, **settings: Any) -> AsyncIterator[Engine]:
    """Run an engine, a thread of which hangs until `release` is set, which is the case at the end."""
    async with toy_engine(watchdog_timeout_seconds=TIMEOUT, **settings) as engine:
        try:
            yield engine
        finally:
            release.set()
            await engine._device.stop()


def request(max_tokens: int = 5) -> Request:
    return Request("r", (1, 2), SamplingParams(max_tokens=max_tokens, seed=7, ignore_eos=True))


def check(engine: Engine, times: int = 2 + int(TIMEOUT)) -> None:
    """Check as often as it takes: a first time for a new job, and for a new call in it."""
    for _ in range(times):
        engine._check_threads()


async def until(condition: Callable[[], bool]) -> None:
    """Let the threads work until a condition holds."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come to that")


def test_time_counts_only_without_any_progress() -> None:
    moves: list[object] = []
    watchdog = Watchdog({"part": lambda: moves.pop(0)}, TIMEOUT)
    for values, is_stuck in (
        ([1, 1, 1, 1], True),
        ([1, 1, 1, 2, 2, 2], False),
        ([3, 3, 3, None, 3, 3, 3], False),
        ([None] * 10, False),
        (list(range(10)), False),
    ):
        moves[:] = values
        assert [watchdog.check() for _ in values][-1] == ("part" if is_stuck else None), values
        moves[:] = [None]
        assert watchdog.check() is None


async def test_a_stuck_device_ends_the_engine(run_ahead: int, capfd: pytest.CaptureFixture[str]) -> None:
    has_begun, release = threading.Event(), threading.Event()

    def hang_in_this_step(plan: object) -> None:
        has_begun.set()
        release.wait()

    async with engine_around(release, run_ahead=run_ahead, before_step=hang_in_this_step) as engine:
        running, waiting = engine.submit(request()), engine.submit(request())
        await asyncio.to_thread(has_begun.wait)
        await until(lambda: engine._delivery.progress() is None)  # it opens the streams
        check(engine, 2)
        engine.check_alive()
        check(engine)
        for stream in (running, waiting):
            with pytest.raises(EngineDead, match="The device is stuck: it has made no progress for 3 s"):
                await stream.collect()
        with pytest.raises(EngineDead, match="stuck"):
            engine.submit(request())
        with pytest.raises(EngineDead, match="stuck"):
            engine.check_alive()
        await engine.wait_dead()
        assert "hang_in_this_step" in capfd.readouterr().err, "the log does not show where the thread is"


async def test_a_slow_step_that_moves_on_is_left_alone(run_ahead: int) -> None:
    has_begun, may_end = threading.Semaphore(0), threading.Semaphore(0)
    num_layers = 5 * int(TIMEOUT)

    def layer() -> None:
        has_begun.release()
        may_end.acquire()

    def slow(plan: object) -> None:
        for _ in range(num_layers):
            layer()

    async with toy_engine(run_ahead=run_ahead, before_step=slow, watchdog_timeout_seconds=TIMEOUT) as engine:
        stream = engine.submit(request(1))
        for _ in range(num_layers):
            await asyncio.to_thread(has_begun.acquire)
            check(engine, 1)
            may_end.release()
        assert (await stream.collect()).text == to_text(reference([1, 2], 1, seed=7))


async def test_an_idle_engine_is_not_stuck() -> None:
    async with toy_engine(watchdog_timeout_seconds=TIMEOUT) as engine:
        await engine.submit(request()).collect()
        await idle(engine)
        check(engine, 100)
        engine.check_alive()


async def test_a_device_thread_that_has_ended_ends_the_engine(capfd: pytest.CaptureFixture[str]) -> None:
    async with toy_engine() as engine:
        engine._device._jobs.put(None)
        stream = engine.submit(request())
        await asyncio.to_thread(engine._device._thread.join)
        check(engine, 1)
        with pytest.raises(EngineDead, match="device thread has ended"):
            await stream.collect()
    assert "Thread 0x" in capfd.readouterr().err


async def test_a_panic_in_a_step_ends_its_requests_alone(run_ahead: int) -> None:
    class Panic(BaseException):
        """What a library in Rust raises."""

    faults = [Panic("no")]

    def panic_once(plan: object) -> None:
        if faults:
            raise faults.pop()

    async with toy_engine(run_ahead=run_ahead, before_step=panic_once) as engine:
        with pytest.raises(StepFailed):
            await engine.submit(request()).collect()
        assert (await engine.submit(request()).collect()).num_tokens == 5


async def test_a_stuck_detokenizer_ends_the_engine() -> None:
    release = threading.Event()
    async with engine_around(release) as engine:
        engine._delivery._detokenizer.process = lambda jobs: release.wait() and []
        stream = engine.submit(request(100))
        await until(lambda: not engine._in_flight and engine._delivery.progress() == 0)  # its first job hangs
        check(engine)
        with pytest.raises(EngineDead, match="The detokenizer is stuck"):
            await stream.collect()


async def test_a_stuck_tokenizer_ends_the_engine() -> None:
    release = threading.Event()
    async with engine_around(release) as engine:
        pool = engine.tokenizer
        pool._tokenizer.encode_batch = lambda *texts, **options: release.wait()
        callers = [asyncio.create_task(pool.encode_batch(["x"])) for _ in range(3)]
        await asyncio.sleep(0)
        check(engine)
        for caller in callers:
            with pytest.raises(Draining):
                await caller
        with pytest.raises(Draining):
            await pool.encode_batch(["x"])
        with pytest.raises(EngineDead, match="The tokenizer is stuck"):
            engine.check_alive()


async def test_a_text_that_is_encoded_for_too_long_holds_up_one_thread() -> None:
    release = threading.Event()
    async with engine_around(release) as engine:
        tokenizer = engine.tokenizer._tokenizer

        def encode(texts: list[str], **options: object) -> list[list[int]]:
            if texts == ["endless"]:
                release.wait()
            return [[7] for _ in texts]

        tokenizer.encode_batch = encode
        pool = TokenizerPool(tokenizer, num_threads=2, max_model_len=10, timeout_seconds=0.01)
        with pytest.raises(QueueTimeout, match=r"not tokenized within 0\.01 s"):
            await pool.encode_batch(["endless"])
        pool._timeout_seconds = 60
        assert await pool.encode_batch(["short"]) == [[7]]
        pool.close()


async def test_a_panic_of_the_tokenizer_is_an_error_of_its_request() -> None:
    async with toy_engine() as engine:

        def panic(*texts: object, **options: object) -> None:
            raise BaseException("a panic in Rust")

        engine.tokenizer._tokenizer.encode_batch = panic
        with pytest.raises(StepFailed, match="tokenizer failed"):
            await engine.tokenizer.encode_batch(["x"])
