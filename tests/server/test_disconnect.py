"""A client may leave in any turn of the loop; its requests end, whoever read the transport's only notice."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message

from engine.request import Request
from server.app import build_app
from server.body import IncomingBody
from server.config import ServerConfig
from server.watch import Watch
from tests.server.fake_engine import FakeEngine, FakeStream

ENDLESS = "hang"
CHAT = {"messages": [{"role": "user", "content": ENDLESS}], "max_tokens": 1000}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": [ENDLESS, ENDLESS], "max_tokens": 1000},
    "/v1/messages": CHAT,
    "/v1/responses": {"input": ENDLESS},
    "/generate": {"inputs": ENDLESS, "parameters": {"max_new_tokens": 1000}},
}
NUM_TURNS = 8


class WatchedEngine(FakeEngine):
    """An engine that calls `on_submit` when a group was submitted."""

    on_submit: Callable[[], None]

    def submit_group(self, requests: list[Request], series: Any = None) -> list[FakeStream]:
        streams = super().submit_group(requests, series)
        self.on_submit()
        return streams


class Transport:
    """Delivers one body and, after leave(), one disconnect; a reader that comes later waits for ever."""

    def __init__(self, body: bytes) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.messages.put_nowait({"type": "http.request", "body": body, "more_body": False})

    def leave(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})

    async def send(self, message: Message) -> None:
        await asyncio.sleep(0)


def after(turns: int, act: Callable[[], object]) -> None:
    """Call `act` in the loop's turn number `turns` from now; 0 is now."""
    if turns:
        asyncio.get_running_loop().call_soon(after, turns - 1, act)
    else:
        act()


async def check_end(
    path: str,
    body: dict[str, Any],
    turns: int,
    cause: Callable[[Transport, "asyncio.Task[None]"], Callable[[], object]],
) -> None:
    """Check that a request's computation ends when `cause` acts, `turns` after it was submitted."""
    engine = WatchedEngine()
    app = build_app(engine, ServerConfig(ping_seconds=1000))  # type: ignore[arg-type]
    transport = Transport(json.dumps(body).encode())
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
    }
    answering = asyncio.create_task(app(scope, transport.messages.get, transport.send))  # type: ignore[arg-type]
    engine.on_submit = lambda: after(turns, cause(transport, answering))
    async with asyncio.timeout(20):
        await asyncio.wait([answering])
    assert engine.aborted, f"the request ends although its client leaves {turns} turns after its submission"
    assert not engine.live
    assert answering.cancelled() or answering.exception() is None


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", BODIES)
async def test_request_ends_whenever_its_client_leaves(path: str, stream: bool) -> None:
    for turns in range(NUM_TURNS):
        await check_end(path, {**BODIES[path], "stream": stream}, turns, lambda transport, _: transport.leave)


async def test_request_ends_whenever_its_handler_is_cancelled() -> None:
    for turns in range(NUM_TURNS):
        await check_end("/v1/chat/completions", {**CHAT, "stream": True}, turns, lambda _, task: task.cancel)


@pytest.mark.parametrize("read_first", ["receive", "linger", "drop_rest"])
async def test_every_reader_is_given_the_disconnect(read_first: str) -> None:
    transport = Transport(b"")
    transport.messages.get_nowait()
    transport.leave()
    context: Any = build_app(None, ServerConfig()).state.context
    incoming = IncomingBody(transport.messages.get, context, Watch())
    async with asyncio.timeout(20):
        await getattr(incoming, read_first)()
        for _ in range(2):
            assert (await incoming.receive())["type"] == "http.disconnect"
        await incoming.drop_rest()
