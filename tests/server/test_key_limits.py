"""Limits of each API key: at once, requests and tokens a minute; what OpenAI's client makes of a 429."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from pydantic import SecretStr

from server.config import ServerConfig
from server.errors import KeyLimitReached
from server.key_limits import Allowance, TokenBucket
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all limits."""
    clock = Clock()
    monkeypatch.setattr(Allowance.__init__, "__defaults__", (clock,))
    return clock


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_bucket_is_full_at_first_and_grows_evenly() -> None:
    clock = Clock()
    bucket = TokenBucket(120, clock)
    bucket.take(120)
    assert bucket.seconds_left() == pytest.approx(0.5)
    clock.seconds += 0.5
    assert bucket.seconds_left() == pytest.approx(0)
    clock.seconds += 3600
    bucket.take(119)
    assert bucket.seconds_left() == 0, "an hour holds no more than a minute"
    bucket.take(1)
    assert bucket.seconds_left() == pytest.approx(0.5)


def test_a_debt_is_made_up_for() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.take(180)
    assert bucket.seconds_left() == pytest.approx(121)
    clock.seconds += 60
    assert bucket.seconds_left() == pytest.approx(61)


def test_a_refused_request_counts_as_none() -> None:
    clock = Clock()
    allowance = Allowance(ServerConfig(key_requests=1, key_requests_per_minute=2), clock)
    allowance.begin()
    for _ in range(5):
        with pytest.raises(KeyLimitReached, match="1 requests at once"):
            allowance.begin()
    allowance.end(None)
    allowance.begin()
    allowance.end(None)
    with pytest.raises(KeyLimitReached, match="requests a minute") as refused:
        allowance.begin()
    assert refused.value.retry_after_seconds == 30
    clock.seconds += 30
    allowance.begin()


async def test_keys_do_not_use_up_what_others_have(engine: FakeEngine, clock: Clock) -> None:
    async with client_for(engine, api_key=("one", "two"), key_requests_per_minute=2) as client:

        async def status(key: str) -> int:
            return (await client.post(CHAT, json=HELLO, headers=bearer(key))).status_code

        assert [await status(key) for key in ("one", "one", "one", "two", "two", "two")] == [
            200,
            200,
            429,
            200,
            200,
            429,
        ]
        assert await status("three") == 401
        refused = await client.post(CHAT, json=HELLO, headers={"x-api-key": "one"})
        assert refused.status_code == 429, "a key is the same in both headers"
        assert refused.headers["retry-after"] == "30"
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "slow_down")
        assert (await client.get("/v1/models", headers=bearer("one"))).status_code == 200
        assert (await client.get("/health")).status_code == 200
        clock.seconds += 30
        assert await status("one") == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_prompts_and_answers_are_counted(
    engine: FakeEngine, clock: Clock, stream: bool
) -> None:
    async with client_for(engine, key_tokens_per_minute=4) as client:
        answer = await client.post(CHAT, json={**HELLO, "stream": stream})
        assert answer.status_code == 200
        used = (await client_for(engine).post(CHAT, json=HELLO)).json()["usage"]["total_tokens"]
        assert used > 4, "or the test says nothing"
        refused = await client.post(CHAT, json=HELLO)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == str((used - 3) * 15)
        clock.seconds += (used - 3) * 15
        assert (await client.post(CHAT, json=HELLO)).status_code == 200


async def test_a_request_that_fails_frees_its_place(engine: FakeEngine) -> None:
    async with client_for(engine, key_requests=1) as client:
        for _ in range(3):
            assert (await client.post(CHAT, json={})).status_code == 400
            assert (await client.post("/nothing")).status_code == 404
        assert (await client.post(CHAT, json=HELLO)).status_code == 200


async def test_clients_without_a_key_use_up_nothing(engine: FakeEngine) -> None:
    async with client_for(engine, api_key=("one",), key_requests_per_minute=1) as client:
        for path in ("/health", "/metrics", CHAT):
            assert (await client.post(path, json=HELLO)).status_code in (401, 405)
        assert (await client.post(CHAT, json=HELLO, headers=bearer("one"))).status_code == 200


async def test_what_asks_no_model_is_not_limited(engine: FakeEngine) -> None:
    async with client_for(engine, key_requests_per_minute=1) as client:
        assert (await client.post(CHAT, json=HELLO)).status_code == 200
        for path in ("/get_model_name", "/stop_profile", "/nothing"):
            assert (await client.post(path)).status_code != 429, path
        assert (await client.post(CHAT + "/", json=HELLO)).status_code == 429


async def test_requests_at_once_without_keys_are_those_of_all(engine: FakeEngine) -> None:
    async with client_for(engine, key_requests=2) as client:
        running = [asyncio.create_task(client.post(CHAT, json=HELLO)) for _ in range(5)]
        statuses = [response.status_code for response in await asyncio.gather(*running)]
    assert sorted(statuses) == [200, 200, 429, 429, 429]


async def test_messages_have_their_own_envelope(engine: FakeEngine, clock: Clock) -> None:
    body = {"model": "fake-model", **HELLO}
    async with client_for(engine, key_requests_per_minute=1) as client:
        assert (await client.post("/v1/messages", json=body)).status_code == 200
        refused = await client.post("/v1/messages", json=body)
    assert refused.json()["error"]["type"] == "rate_limit_error"


async def test_openai_client_waits_as_long_as_it_is_asked(
    engine: FakeEngine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    sleep = asyncio.sleep

    async def pass_time(seconds: float, result: Any = None) -> Any:
        if seconds:
            waited.append(seconds)
            clock.seconds += seconds
        return await sleep(0, result)

    async with openai.AsyncOpenAI(
        api_key="one",
        base_url="http://test/v1",
        http_client=client_for(engine, api_key=("one",), key_requests_per_minute=2),
    ) as client:
        ask: Callable[[], Any] = lambda: client.chat.completions.create(  # noqa: E731
            model="fake-model", messages=[{"role": "user", "content": "hi"}], max_tokens=3
        )
        await ask()
        await ask()
        monkeypatch.setattr("anyio.sleep", pass_time)
        answer = await ask()
    assert answer.choices[0].message.content
    assert waited == [30]


def test_no_key_is_kept_or_logged(caplog: pytest.LogCaptureFixture, engine: FakeEngine) -> None:
    caplog.set_level(logging.DEBUG)

    async def ask() -> list[httpx.Response]:
        async with client_for(engine, api_key=("hidden-key",), key_requests_per_minute=1) as client:
            return [await client.post(CHAT, json=HELLO, headers=bearer("hidden-key")) for _ in range(2)]

    responses = asyncio.run(ask())
    assert [response.status_code for response in responses] == [200, 429]
    assert "hidden" not in caplog.text
    assert "hidden" not in responses[1].text
    allowance = Allowance(ServerConfig(api_key=(SecretStr("hidden-key"),), key_requests=1))
    assert "hidden" not in repr(vars(allowance))
