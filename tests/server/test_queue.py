"""A real engine's queue over HTTP: who comes when it is full is told when to come back."""

import asyncio
import threading

import httpx
import pytest

from engine import Engine
from engine.outputs import StepPlan
from tests.engine.toy_engine import toy_engine
from tests.server.conftest import client_for


async def until_waiting(engine: Engine, number: int) -> None:
    for _ in range(10_000):
        if engine.stats().waiting == number:
            return
        await asyncio.sleep(0.001)
    pytest.fail(f"{engine.stats().waiting} wait, {number} should")


async def complete(client: httpx.AsyncClient, num_prompt_tokens: int) -> httpx.Response:
    body = {"prompt": [1] * num_prompt_tokens, "max_tokens": 1}
    return await client.post("/v1/completions", json=body)


@pytest.mark.parametrize("bound", [{"max_waiting_tokens": 50}, {"max_waiting": 1}])
async def test_more_than_the_queue_may_hold_is_refused(bound: dict[str, int]) -> None:
    is_running, may_go_on = threading.Event(), threading.Event()

    def hold(plan: StepPlan) -> None:
        is_running.set()
        may_go_on.wait(10)

    async with toy_engine(max_num_seqs=1, before_step=hold, **bound) as engine, client_for(engine) as client:
        admitted = [asyncio.ensure_future(complete(client, 60))]  # more than may wait, but it starts
        assert await asyncio.to_thread(is_running.wait, 10)
        admitted.append(asyncio.ensure_future(complete(client, 40)))
        await until_waiting(engine, 1)
        refused = await complete(client, 11)
        assert refused.status_code == 429, refused.text
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "slow_down")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        if "max_waiting_tokens" in bound:
            assert "tokens" in error["message"]
            admitted.append(asyncio.ensure_future(complete(client, 10)))  # as many as there is room for
            await until_waiting(engine, 2)
        may_go_on.set()
        assert [answer.status_code for answer in await asyncio.gather(*admitted)] == [200] * len(admitted)
        assert (await complete(client, 60)).status_code == 200, "whoever comes back is served"
