"""The application with a lifespan of its own, as another ASGI server runs it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from engine.errors import FetchFailed
from server import hosted
from server.context import ServerContext
from server.flags import SettingsError
from server.settings import parse
from tests.server import serve_fake
from tests.server.fake_engine import FakeEngine


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.lifecycle.start_engine", serve_fake.start_fake_engine)
    monkeypatch.setattr(hosted, "set_up_logging", lambda *_: None)  # would last beyond the test


@asynccontextmanager
async def running(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
    ):
        yield client


def chat(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def engine_of(app: Starlette) -> FakeEngine:
    context: ServerContext = app.state.context
    return context.engine  # type: ignore[return-value]


async def test_the_lifespan_is_that_of_the_engine() -> None:
    app = hosted.hosted_app(parse([]))
    async with running(app) as client:
        assert (await client.get("/ready")).status_code == 200
        answer = await client.post("/v1/chat/completions", json=chat("tokens=2"))
        assert answer.json()["choices"][0]["message"]["content"] == "t0 t1 "
        last = asyncio.create_task(client.post("/v1/chat/completions", json=chat("tokens=3 delay=0.01")))
        while not engine_of(app).live:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert (await last).status_code == 200, "the end of the lifespan did not wait for a request"
    assert engine_of(app).is_draining


@pytest.mark.parametrize("given", [True, False])
async def test_the_host_may_return_the_id_of_a_request(given: bool) -> None:
    app = hosted.hosted_app(parse([]), host_returns_request_id=given)
    async with running(app) as client:
        answer = await client.get("/v1/models", headers={"x-request-id": "mine"})
    assert answer.headers.get("x-request-id") == (None if given else "mine")


@pytest.mark.parametrize(
    ("flags", "error", "reason"),
    [
        (["--model", "missing"], SettingsError, "--model: there is no model called missing"),
        (["--model", "far"], FetchFailed, "far could not be fetched"),
        (["--max-model-len", "1"], SettingsError, "--max-model-len: 1 is too little; raise --kv-tokens"),
    ],
)
async def test_a_start_that_fails_says_why(
    flags: list[str], error: type[Exception], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=reason):
        async with running(hosted.hosted_app(parse(flags))):
            pass
    assert f"monoloop: error: {reason}\n" in capsys.readouterr().err


async def test_the_process_ends_when_the_engine_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: asyncio.Queue[int] = asyncio.Queue()
    monkeypatch.setattr("server.lifecycle.exit_now", codes.put_nowait)
    monkeypatch.setattr(hosted, "LAST_EVENTS_SECONDS", 0)
    async with running(hosted.hosted_app(parse([]))) as client:
        answer = await client.post("/v1/chat/completions", json=chat("die=1"))
        assert answer.status_code == 503
        assert await asyncio.wait_for(codes.get(), 10) == 1
