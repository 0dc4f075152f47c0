import asyncio
import itertools

import pytest

from engine.errors import StepFailed
from engine.outputs import FinishReason, TextDelta
from engine.text.mailbox import Mailbox, Pacer


def delta(text: str, finish: FinishReason | None = None) -> TextDelta:
    return TextDelta(text, len(text), finish)


async def test_takes_everything_that_waits():
    mailbox = Mailbox(Pacer(1000))
    for char in "abc":
        mailbox.put(delta(char))
    assert await mailbox.take() == delta("abc")


async def test_a_waiting_reader_is_woken_for_every_delta_when_streams_are_few():
    pacer = Pacer(1_000_000)
    pacer.num_streams = 1
    mailbox = Mailbox(pacer)
    seen = []

    async def read():
        while True:
            seen.append(await mailbox.take())
            if seen[-1].finish_reason:
                return

    reader = asyncio.create_task(read())
    for char in "abcd":
        await asyncio.sleep(0.001)
        mailbox.put(delta(char))
    await asyncio.sleep(0.001)
    mailbox.put(delta("", FinishReason.STOP))
    await reader
    assert [d.text for d in seen] == ["a", "b", "c", "d", ""]


async def test_many_streams_merge_but_neither_the_first_nor_the_last_delta_waits():
    pacer = Pacer(100)
    pacer.num_streams = 5  # so 50 ms between deliveries
    mailbox = Mailbox(pacer)
    loop = asyncio.get_running_loop()
    arrivals = []

    async def read():
        while True:
            got = await mailbox.take()
            arrivals.append((loop.time(), got.text))
            if got.finish_reason:
                return

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    begin = loop.time()
    for index in range(24):
        mailbox.put(delta(chr(97 + index)))
        await asyncio.sleep(0.005)
    mailbox.put(delta("!", FinishReason.LENGTH))
    end = loop.time()
    await reader
    assert "".join(text for _, text in arrivals) == "abcdefghijklmnopqrstuvwx!"
    assert arrivals[0][1] == "a"
    assert arrivals[0][0] - begin < 0.040, "the first token does not wait"
    assert arrivals[-1][0] - end < 0.040, "the last delta does not wait"
    gaps = [b[0] - a[0] for a, b in itertools.pairwise(arrivals[:-1])]
    assert gaps, "text was delivered in between"
    assert min(gaps) >= 0.045, f"deliveries in between keep their distance: {gaps}"


async def test_an_error_comes_after_the_text_before_it():
    mailbox = Mailbox(Pacer(1000))
    mailbox.put(delta("abc"))
    mailbox.fail(StepFailed("broken"))
    assert (await mailbox.take()).text == "abc"
    with pytest.raises(StepFailed):
        await mailbox.take()
    with pytest.raises(StepFailed):
        await mailbox.take()


async def test_an_error_wakes_a_waiting_reader():
    mailbox = Mailbox(Pacer(1000))
    reader = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.fail(StepFailed("broken"))
    with pytest.raises(StepFailed):
        await asyncio.wait_for(reader, 1)


async def test_a_cancelled_reader_loses_nothing():
    mailbox = Mailbox(Pacer(1000))
    reader = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    mailbox.put(delta("a"))
    assert (await mailbox.take()).text == "a"
