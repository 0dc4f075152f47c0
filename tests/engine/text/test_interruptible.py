"""Work that another thread ends: only this work, whatever the moment."""

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from engine.text import interruptible
from engine.text.interruptible import Interrupted, Interruptible, Watch


@pytest.fixture
def thread():
    """One, that is switched to and from often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with ThreadPoolExecutor(1) as executor:
        yield executor
    sys.setswitchinterval(interval)


async def run(thread: ThreadPoolExecutor, work: Callable, seconds: float = 60):
    watch = Watch(seconds)
    job = watch.over()
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, job.run, work)
    finally:
        watch.dismiss(job)


def endless() -> None:
    while True:
        pass


async def test_what_ends_by_itself_is_left_alone(thread):
    assert await run(thread, lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        await run(thread, lambda: 1 // 0)


async def test_what_takes_long_is_ended(thread):
    async with asyncio.timeout(30):
        for _ in range(3):
            with pytest.raises(Interrupted):
                await run(thread, endless, 0.01)
            assert await run(thread, lambda: sum(range(1000))) == 499_500


async def test_the_time_in_the_queue_does_not_count(thread):
    thread.submit(time.sleep, 0.2)
    assert await run(thread, lambda: 5, 0.05) == 5


async def test_an_interruption_that_is_lost_comes_again(thread, monkeypatch):
    monkeypatch.setattr(interruptible, "LOOK_SECONDS", 0.01)
    lost = []

    def stubborn() -> None:
        while len(lost) < 3:
            try:
                endless()
            except Interrupted:
                lost.append(1)
        endless()

    async with asyncio.timeout(30):
        with pytest.raises(Interrupted):
            await run(thread, stubborn, 0.01)
        lost.clear()
        leaving = asyncio.create_task(run(thread, stubborn))
        await asyncio.sleep(0.05)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert await run(thread, lambda: 5) == 5


async def test_what_is_left_before_it_began_never_begins(thread):
    watch, did = Watch(60), []
    job = watch.over()
    watch.dismiss(job)
    with pytest.raises(Interrupted):
        await asyncio.get_running_loop().run_in_executor(thread, job.run, lambda: did.append(1))
    assert not did


def test_an_interruption_on_its_way_when_the_work_ends_is_taken_back(thread, monkeypatch):
    job, asked = Interruptible(threading.Lock()), threading.Event()
    send = interruptible._set_async_exception

    def send_late(thread_id, exception) -> None:
        if threading.get_ident() != thread_id:
            asked.set()
            while job.is_running:
                time.sleep(0.001)
        send(thread_id, exception)

    monkeypatch.setattr(interruptible, "_set_async_exception", send_late)
    ending = thread.submit(job.run, lambda: asked.wait(30))
    while not job.is_running:
        time.sleep(0.001)
    job.interrupt()
    assert ending.exception(timeout=30) is None or isinstance(ending.exception(), Interrupted)
    for _ in range(100):
        assert thread.submit(sum, range(5)).result(timeout=30) == 10, "the thread lives"


def test_an_interruption_hits_its_work_and_nothing_else(thread):
    """Sent at many moments from before the work begins to after its end."""
    chance = random.Random(0)

    def once(job: Interruptible, begun: threading.Event, num_turns: int) -> int:
        with suppress(Interrupted):
            job.run(lambda: begun.set() or sum(turn for turn in range(num_turns)))
        return len([str(turn) for turn in range(20)])  # where a late one would be raised

    for _ in range(1000):
        job, begun = Interruptible(threading.Lock()), threading.Event()
        future = thread.submit(once, job, begun, chance.randrange(20_000))
        begun.wait(30)
        for _ in range(chance.randrange(20_000)):
            pass
        job.interrupt()
        job.interrupt()
        assert future.result(timeout=30) == 20


TRACED = """
import sys, threading
from engine.text.interruptible import Interrupted, Interruptible
for delay in (0.0, 0.001, 0.01):
    work = Interruptible(threading.Lock())
    threading.Timer(delay, work.interrupt).start()
    try:
        work.run(lambda: sum(range(100_000)))
    except Interrupted:
        pass
work = Interruptible(threading.Lock())
try:
    work.run(work.interrupt)
except Interrupted:
    pass
calls = []
sys.setprofile(lambda *event: calls.append(event))
(lambda: None)()
sys.setprofile(None)
assert calls
"""


def test_the_interpreter_is_left_as_it_was() -> None:
    """A mark that is left behind makes CPython 3.11 stand still in the first function that is traced."""
    done = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
