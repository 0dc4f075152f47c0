"""POST /abort ends requests by their ids, wherever they are.

Covers server/open_requests.py.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.types import Message

from engine.outputs import StepPlan
from server.app import build_app
from server.config import ServerConfig
from server.schema.abort import AbortRequest
from tests.engine.toy_engine import idle, toy_engine
from tests.server.conftest import LiveServer, client_for
from tests.server.fake_engine import FakeEngine
from tests.server.h2_client import H2Client

SLOW = "tokens=4000 delay=0.01"
BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}], "n": 2},
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 4000},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 4000},
    "/generate": lambda text: {"inputs": text, "parameters": {"max_new_tokens": 4000}},
}


class Call:
    """A request over ASGI whose answer can be looked at while it comes."""

    def __init__(self, app: Any, path: str, body: dict[str, Any], request_id: str, api_key: str = "") -> None:
        self.num_answers = body.get("n", 1)
        self.sent: list[Message] = []
        self.received: asyncio.Queue[Message] = asyncio.Queue()
        self.received.put_nowait(
            {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        )
        headers = [
            (b"content-type", b"application/json"),
            (b"x-request-id", request_id.encode()),
            (b"x-api-key", api_key.encode()),
        ]
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": path, "headers": headers}
        self.task = asyncio.create_task(app({**scope, "query_string": b""}, self.received.get, self.send))

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    async def until(self, condition: Callable[[], object]) -> None:
        """Let it go on until a condition holds."""
        async with asyncio.timeout(20):
            while not condition():
                assert not self.task.done(), f"it has ended: {self.sent}"
                await asyncio.sleep(0.001)

    async def end(self) -> None:
        """Wait for its end."""
        async with asyncio.timeout(20):
            await self.task


async def abort(client: httpx.AsyncClient, path: str = "/abort", **body: Any) -> int:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    aborted = response.json()["aborted"]
    assert isinstance(aborted, int)
    return aborted


@asynccontextmanager
async def server_of(engine: Any, **settings: Any) -> AsyncIterator[tuple[Any, httpx.AsyncClient]]:
    app = build_app(engine, ServerConfig(**settings))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield app, client


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", BODIES)
async def test_request_that_waits_ends_with_a_status(engine: FakeEngine, path: str, stream: bool) -> None:
    async with server_of(engine) as (app, client):
        call = Call(app, path, {**BODIES[path]("hang"), "stream": stream}, "mine")
        other = Call(app, path, {**BODIES[path]("hang"), "stream": stream}, "other")
        await call.until(lambda: len(engine.live) == 2 * other.num_answers)
        assert await abort(client, request_id="mine") == 1
        await call.end()
        assert call.sent[0]["status"] == 499, call.text
        assert "aborted" in call.text
        assert not other.task.done(), "another request goes on"
        assert await abort(client, request_id="mine") == 0, "it has ended"
        assert await abort(client, abort_all=True) == 1
        await other.end()
        assert not engine.live


@pytest.mark.parametrize("path", BODIES)
async def test_stream_ends_with_an_error_event(
    engine: FakeEngine, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="monoloop.access")
    async with server_of(engine) as (app, client):
        call = Call(app, path, {**BODIES[path](SLOW), "stream": True}, "mine")
        await call.until(lambda: "t1 " in call.text)
        assert await abort(client, "/abort_request", request_id="mine") == 1
        await call.end()
    assert call.sent[0]["status"] == 200
    assert "The request was aborted." in call.text.split("t1 ")[-1], call.text[-500:]
    assert not call.sent[-1]["more_body"], "the body ends as every body does"
    assert not engine.live
    assert any(line.startswith("mine ") and line.endswith("ended=abort") for line in caplog.messages)


@pytest.mark.parametrize(("name", "body"), [("id", {}), ("rid", {"rid": "mine"}), ("n", {"request_id": 7})])
async def test_answer_has_more_than_one_id(engine: FakeEngine, name: str, body: dict[str, Any]) -> None:
    async with server_of(engine) as (app, client):
        call = Call(
            app, "/v1/completions", {"prompt": SLOW, "max_tokens": 4000, "stream": True, **body}, "header"
        )
        await call.until(lambda: "t1 " in call.text)
        asked = {"rid": "mine"} if name == "rid" else {"request_id": 7}
        if name == "id":
            asked = {"request_id": json.loads(call.text.partition("data: ")[2].partition("\n")[0])["id"]}
        assert await abort(client, request_id="head") == 0, "a part of an id is none"
        assert await abort(client, **asked) == 1
        await call.end()


async def test_all_ends_neither_itself_nor_who_watches_the_engine(engine: FakeEngine) -> None:
    async with server_of(engine) as (app, client):
        watcher = Call(app, "/live_stats", {}, "watcher")
        calls = [Call(app, "/v1/completions", {"prompt": "hang"}, "same") for _ in range(3)]
        await calls[0].until(lambda: len(engine.live) == 3)
        assert await abort(client, abort_all=True) == 3
        await asyncio.gather(*(call.end() for call in calls))
        assert await abort(client, abort_all=True) == 0
        watcher.received.put_nowait({"type": "http.disconnect"})
        await watcher.end()


@pytest.mark.parametrize("body", [{}, {"request_id": ""}, {"abort_all": False}, {"request_id": ["a"]}])
async def test_body_that_names_nothing_is_refused(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    for path in ("/abort", "/abort_request"):
        response = await client.post(path, json=body)
        assert response.status_code == 400, response.text
        assert "request_id" in response.json()["error"]["message"] or body


def test_number_is_an_id() -> None:
    assert AbortRequest(request_id=0).wanted == "0"


async def test_key_is_needed(engine: FakeEngine) -> None:
    async with client_for(engine, api_key=("secret",)) as client:
        for path in ("/abort", "/abort_request"):
            assert (await client.post(path, json={"abort_all": True})).status_code == 401


async def test_key_ends_its_own_requests_alone(engine: FakeEngine) -> None:
    keys = ("first", "second")
    async with server_of(engine, api_key=keys) as (app, client):
        calls = [
            Call(app, "/v1/completions", {"prompt": "hang"}, request_id, key)
            for key in keys
            for request_id in ("same", "other")
        ]
        await calls[0].until(lambda: len(engine.live) == 4)
        client.headers["x-api-key"] = "second"
        assert [await abort(client, request_id="same") for _ in range(2)] == [1, 0], "it has one of that id"
        await calls[2].end()
        assert await abort(client, abort_all=True) == 1
        await calls[3].end()
        assert not calls[0].task.done() and not calls[1].task.done(), "those of the first key go on"
        client.headers["x-api-key"] = "first"
        assert await abort(client, abort_all=True) == 2
        await asyncio.gather(*(call.end() for call in calls))
        assert not engine.live


async def test_pages_return_and_the_others_go_on() -> None:
    """One request is in a step, one waits, one has streamed: two of them end."""
    is_running, may_go_on = threading.Event(), threading.Event()

    def hold(plan: StepPlan) -> None:
        is_running.set()
        may_go_on.wait(10)

    async with toy_engine(max_num_seqs=2, before_step=hold) as engine, server_of(engine) as (app, client):
        calls = {
            name: Call(
                app, "/v1/completions", {"prompt": [1] * 60, "max_tokens": 9, "ignore_eos": True}, name
            )
            for name in ("prefilling", "other", "waiting")
        }
        assert await asyncio.to_thread(is_running.wait, 10)
        await calls["waiting"].until(lambda: engine.stats().running + engine.stats().waiting == 3)
        assert [await abort(client, request_id=name) for name in ("prefilling", "waiting")] == [1, 1]
        may_go_on.set()
        await asyncio.gather(*(call.end() for call in calls.values()))
        assert [call.sent[0]["status"] for call in calls.values()] == [499, 200, 499]
        await idle(engine)


async def test_both_protocols(start: Callable[..., LiveServer]) -> None:
    server = start().ready()
    body = json.dumps({"prompt": SLOW, "max_tokens": 4000, "stream": True}).encode()
    peer = await H2Client.connect(server.port)
    number = peer.send("/v1/completions", body, content_type="application/json", x_request_id="two")
    await peer.until(lambda: b"t1 " in peer.bodies[number])
    async with httpx.AsyncClient(base_url=server.url, verify=False, trust_env=False) as client:
        options: dict[str, Any] = {"content": body, "headers": {"content-type": "application/json"}}
        async with client.stream("POST", "/v1/completions", **options) as response:
            lines = response.aiter_lines()
            assert "t0 " in await anext(lines)
            request_id = response.headers["x-request-id"]
            assert [await abort(client, request_id=name) for name in ("two", request_id)] == [1, 1]
            rest = [line async for line in lines if line]
        assert "request_aborted" in rest[-2]
        assert rest[-1] == "data: [DONE]"
    status, data = await peer.answer(number)
    assert status == 200
    assert b"request_aborted" in data[-300:]
    await peer.close()
