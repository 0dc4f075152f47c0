"""What interrupts a request: its client leaves, its time is up, or a cancellation from elsewhere."""

import asyncio
from typing import Any

import pytest

from server.errors import DeadlinePassed
from server.watch import ClientGone, Watch


async def forever() -> Any:
    await asyncio.Event().wait()


async def leave() -> Any:
    return {"type": "http.disconnect"}


async def test_block_raises_the_first_reason() -> None:
    watch = Watch()
    asyncio.get_running_loop().call_soon(watch.interrupt, DeadlinePassed("first"))
    asyncio.get_running_loop().call_soon(watch.interrupt, DeadlinePassed("second"))
    with pytest.raises(DeadlinePassed, match="first"), watch:
        await forever()
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling(), "the task may go on"
    await asyncio.sleep(0)


async def test_reason_between_two_blocks_is_raised_at_the_next() -> None:
    watch = Watch()
    with watch:
        await asyncio.sleep(0)
    watch.interrupt(ClientGone())
    await asyncio.sleep(0)
    with pytest.raises(ClientGone), watch:
        raise AssertionError("the block is not entered")


async def test_block_that_ends_by_itself_raises_its_own_error() -> None:
    watch = Watch()

    async def work() -> None:
        watch.interrupt(ClientGone())
        try:
            await forever()
        finally:
            raise KeyError

    with pytest.raises(KeyError), watch:
        await work()
    await asyncio.sleep(0)


async def test_cancellation_from_elsewhere_goes_on() -> None:
    for is_interrupted in (False, True):
        watch = Watch()

        async def work(watch: Watch = watch) -> None:
            with watch:
                await forever()

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        if is_interrupted:
            watch.interrupt(ClientGone())
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_leaving_client_and_passed_time_are_reasons() -> None:
    watch = Watch()
    watch.begin(leave, None)
    with pytest.raises(ClientGone), watch:
        await forever()
    watch.end()
    watch = Watch()
    watch.begin(forever, 0)
    with pytest.raises(DeadlinePassed), watch:
        await forever()
    watch.end()


async def test_nothing_is_left_after_the_end() -> None:
    watch = Watch()
    watch.begin(forever, 1000)
    await asyncio.sleep(0)
    watch.end()
    for _ in range(3):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_informed_watch_asks_nobody() -> None:
    async def ask() -> Any:
        raise AssertionError("the transport says when the client leaves")

    watch = Watch(is_informed=True)
    watch.begin(ask, None)
    asyncio.get_running_loop().call_soon(watch.client_left)
    with pytest.raises(ClientGone), watch:
        await forever()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_client_that_left_while_its_body_was_read_is_noticed() -> None:
    watch = Watch(is_informed=True)
    watch.client_left()
    with watch:
        await asyncio.sleep(0)
    watch.begin(forever, None)
    with pytest.raises(ClientGone), watch:
        raise AssertionError("the block is not entered")


async def test_client_may_leave_once_it_is_answered() -> None:
    watch = Watch(is_informed=True)
    watch.begin(forever, None)
    with watch:
        watch.note_answered()
        watch.client_left()
        await asyncio.sleep(0)
