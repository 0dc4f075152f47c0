"""Ends of streamed answers: errors before the first token have a status, and the log tells all ends apart."""

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from engine.errors import Draining, EngineError, QueueTimeout, RequestTimeout, StepFailed
from server.app import build_app
from server.config import ServerConfig
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine

HANG = [{"role": "user", "content": "hang"}]
ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HANG, "n": 2},
    "/v1/completions": {"prompt": "hang"},
    "/v1/responses": {"input": "hang"},
    "/v1/messages": {"messages": HANG, "max_tokens": 20},
    "/generate_stream": {"inputs": "hang"},
}


async def fail_first(engine: FakeEngine, error: EngineError) -> None:
    """Let the first request that comes fail."""
    while not engine.live:  # noqa: ASYNC110 - no event says it
        await asyncio.sleep(0)
    stream, task = next(iter(engine.live.values()))
    task.cancel()
    engine._end(stream, error)


@pytest.mark.parametrize(
    ("error", "status", "retry_after", "end"),
    [
        (QueueTimeout("too long in the queue"), 503, "5", "overload"),
        (Draining("shutting down"), 503, "5", "drain"),
        (RequestTimeout("too long"), 504, None, "timeout"),
        (StepFailed("failed"), 500, None, "error"),
    ],
)
@pytest.mark.parametrize("path", ASKS)
async def test_error_before_the_first_token_has_its_status(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    caplog: pytest.LogCaptureFixture,
    path: str,
    error: EngineError,
    status: int,
    retry_after: str | None,
    end: str,
) -> None:
    caplog.set_level(logging.INFO, logger="monoloop.access")
    failing = asyncio.create_task(fail_first(engine, error))
    response = await client.post(path, json={**ASKS[path], "stream": True})
    await failing
    assert (response.status_code, response.headers.get("retry-after")) == (status, retry_after), response.text
    assert response.headers["content-type"] == "application/json"
    assert str(error) in response.text
    assert caplog.messages[-1].endswith(f" ended={end}")
    assert not engine.live


@pytest.mark.parametrize(
    ("prompt", "end"),
    [
        ("tokens=2", "stop"),
        ("tokens=9", "length"),
        ("fail=1", "error"),
        ("tokens=9 delay=0.3", "timeout"),
    ],
)
async def test_log_tells_how_a_stream_ended(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, prompt: str, end: str
) -> None:
    caplog.set_level(logging.INFO, logger="monoloop.access")
    async with client_for(engine, request_timeout_seconds=1) as client:
        await client.post("/v1/completions", json={"prompt": prompt, "stream": True, "max_tokens": 5})
    assert " 200 " in caplog.messages[-1]
    assert caplog.messages[-1].endswith(f" ended={end}")


@pytest.mark.parametrize(
    ("path", "opening"),
    [
        ("/v1/chat/completions", 'data: {"id"'),
        ("/v1/completions", ": ping\n\n"),
        ("/v1/responses", "event: response.created\n"),
        ("/v1/messages", "event: message_start\n"),
        ("/generate_stream", ": ping\n\n"),
    ],
)
async def test_error_after_a_ping_is_an_event_behind_the_opening(
    engine: FakeEngine, path: str, opening: str
) -> None:
    sent, has_pinged = [], asyncio.Event()
    messages: asyncio.Queue[Any] = asyncio.Queue()
    body = json.dumps({**ASKS[path], "stream": True}).encode()
    messages.put_nowait({"type": "http.request", "body": body, "more_body": False})

    async def send(message: Any) -> None:
        sent.append(message)
        if b"ping" in message.get("body", b""):
            has_pinged.set()

    scope = {"type": "http", "http_version": "2", "method": "POST", "path": path, "query_string": b""}
    scope["headers"] = [(b"content-type", b"application/json")]
    app = build_app(engine, ServerConfig(ping_seconds=0.01))  # type: ignore[arg-type]
    answering = asyncio.create_task(app(scope, messages.get, send))
    async with asyncio.timeout(20):
        await has_pinged.wait()
        await fail_first(engine, QueueTimeout("too long in the queue"))
        await answering
    assert sent[0]["status"] == 200
    text = b"".join(message.get("body", b"") for message in sent).decode()
    assert text.startswith(opening), text
    assert "too long in the queue" in text
    assert not sent[-1]["more_body"]
