import asyncio

import pytest

from engine.errors import StepFailed
from engine.mailbox import Mailbox
from engine.outputs import FinishReason, TextDelta


def delta(text: str, finish: FinishReason | None = None) -> TextDelta:
    return TextDelta(text, len(text), finish)


async def test_takes_everything_that_waits():
    mailbox = Mailbox()
    for char in "abc":
        mailbox.put(delta(char))
    assert await mailbox.take() == delta("abc")


async def test_a_waiting_reader_is_woken_for_every_delta():
    mailbox = Mailbox()
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


async def test_an_error_comes_after_the_text_before_it():
    mailbox = Mailbox()
    mailbox.put(delta("abc"))
    mailbox.fail(StepFailed("broken"))
    assert (await mailbox.take()).text == "abc"
    with pytest.raises(StepFailed):
        await mailbox.take()
    with pytest.raises(StepFailed):
        await mailbox.take()


async def test_an_error_wakes_a_waiting_reader():
    mailbox = Mailbox()
    reader = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.fail(StepFailed("broken"))
    with pytest.raises(StepFailed):
        await asyncio.wait_for(reader, 1)


async def test_a_cancelled_reader_loses_nothing():
    mailbox = Mailbox()
    reader = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    mailbox.put(delta("a"))
    assert (await mailbox.take()).text == "a"


async def test_offered_deltas_are_kept_unless_they_are_taken():
    mailbox = Mailbox()
    taken = []

    def take(offered: TextDelta) -> bool:
        taken.append(offered.text)
        return offered.text != "no"

    mailbox.offer_to(take)
    for text in ("a", "b", "no", "c"):
        mailbox.put(delta(text))
    assert taken == ["a", "b", "no"], "nothing overtakes an unread delta"
    assert (await mailbox.take()).text == "noc"
    mailbox.put(delta("d"))
    assert taken[-1] == "d"
    mailbox.offer_to(None)
    mailbox.put(delta("e"))
    assert (await mailbox.take()).text == "e"
