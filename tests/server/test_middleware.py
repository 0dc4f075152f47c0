"""Request ids, log lines, API keys, CORS, OPTIONS and HEAD."""

import logging
from typing import Any

import httpx
import pytest

from server.app import build_app
from server.config import ServerConfig
from server.routes.table import ENDPOINTS
from server.schema.errors import AnthropicError, ErrorResponse
from tests.server.conftest import client_for
from tests.server.fake_engine import MODEL_NAME, FakeEngine


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ("abc-1.2_X", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("a b", False),
        ("a\u00e9", False),
        ("", False),
    ],
)
async def test_request_id_is_kept_if_it_is_sane(client: httpx.AsyncClient, given: str, is_kept: bool) -> None:
    response = await client.get("/v1/models", headers={"x-request-id": given.encode("latin1")})
    assert (response.headers["x-request-id"] == given) is is_kept
    assert response.headers["x-request-id"].isascii()


async def test_errors_have_a_request_id_too(client: httpx.AsyncClient) -> None:
    assert (await client.get("/nothing")).headers["x-request-id"]


async def test_one_line_per_request_without_content(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="monoloop")
    body = {"messages": [{"role": "user", "content": "private"}]}
    await client.post("/v1/chat/completions?key=hidden", json=body, headers={"x-request-id": "id-1"})
    await client.get("/health")
    await client.get("/evil%0aline%1b")
    lines = [record.getMessage() for record in caplog.records if record.name == "monoloop.access"]
    assert len(lines) == 2, "probes are not worth a line"
    assert lines[0].startswith("id-1 POST /v1/chat/completions 200 ")
    words = f" {MODEL_NAME} 7+5 tokens ttft=12ms itl=3.1ms ended=stop"
    assert lines[0].endswith(words), lines[0]
    assert "private" not in caplog.text
    assert "hidden" not in caplog.text
    assert "/evil\\nline\\x1b" in lines[1]


KEYS = ("one", "zwei\u00fc")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer one"}, 200),
        ({"authorization": "bearer  one "}, 200),
        ({"authorization": "BEARER one"}, 200),
        ({"authorization": "Basic one"}, 401),
        ({"authorization": "one"}, 401),
        ({"authorization": "Bearer on"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "Bearer one, Bearer one"}, 401),
        ({"x-api-key": "one"}, 200),
        ({"x-api-key": "zwei\u00fc".encode()}, 200),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "One"}, 401),
        ({"authorization": "Bearer x", "x-api-key": "one"}, 401),
    ],
)
async def test_keys(engine: FakeEngine, headers: dict[str, Any], status: int) -> None:
    async with client_for(engine, api_key=KEYS) as client:
        response = await client.get("/v1/models", headers=headers)
        assert response.status_code == status
        if status == 401:
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("path", "is_open"),
    [
        ("/health", True),
        ("/ready", True),
        ("/metrics", True),
        ("/version", True),
        ("/load", False),
        ("/openapi.json", False),
        ("/v1/models", False),
        ("/v1/models/x", False),
        ("/nothing", False),
        ("/health/", True),
        ("/health//", True),
        ("http://test//health", True),
        ("/health/../v1/models", False),
        ("/v1/models?x=/health", False),
    ],
)
async def test_only_probes_are_open(engine: FakeEngine, path: str, is_open: bool) -> None:
    async with client_for(engine, api_key=KEYS) as client:
        for host in ("test", "x/health?", "a@b:80"):
            response = await client.get(path, headers={"host": host})
            assert (response.status_code == 200) is is_open, response.text


async def test_open_paths_are_a_setting(engine: FakeEngine) -> None:
    for opened, is_open in (
        ((), {"/health": True, "/metrics": True, "/v1/models": False}),
        (("/health", "/v1/models"), {"/health": True, "/metrics": False, "/v1/models": True}),
        (("/health",), {"/healthz": True, "/ready": False}),
        (("/",), {"/": True, "/web/page.js": True, "/health": False, "/live_stats": False}),
        (("none",), {"/web/page.js": False, "/health": False, "/metrics": False, "/v1/models": False}),
    ):
        async with client_for(engine, api_key=KEYS, open_paths=opened) as client:
            for path, expected in is_open.items():
                assert ((await client.get(path)).status_code == 200) is expected, (opened, path)
            assert (await client.post("/v1/models")).status_code == 401, "other methods are never open"


async def test_cors_is_off_by_default(client: httpx.AsyncClient) -> None:
    page = {"origin": "http://page", "access-control-request-method": "POST"}
    for response in (
        await client.options("/v1/chat/completions", headers=page),
        await client.get("/v1/models", headers={"origin": "http://page"}),
    ):
        assert not [name for name in response.headers if name.startswith("access-control-")]


@pytest.mark.parametrize(
    ("target", "status", "told"),
    [
        ("http://x/health", 200, ""),
        ("HTTPS://x:8000/health", 200, ""),
        ("http://x/v1/models", 401, "API key"),
        ("http://x/nothing", 401, "API key"),
        ("http://x", 200, "docs"),
        ("http:///health", 200, ""),
        ("ftp://x/health", 401, "API key"),
        ("x/http://x/health", 401, "API key"),
    ],
)
async def test_target_may_be_a_whole_url(engine: FakeEngine, target: str, status: int, told: str) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "http_version": "1.1", "method": "GET", "path": target, "query_string": b"",
        "headers": [(b"host", b"x")],
    }  # fmt: skip
    await build_app(engine, ServerConfig(api_key=KEYS))(scope, receive, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == status
    assert told in sent[1]["body"].decode()


async def test_options_tells_what_is_allowed(engine: FakeEngine) -> None:
    async with client_for(engine, api_key=KEYS) as client:
        response = await client.options("/v1/chat/completions")
        assert (response.status_code, response.headers["allow"]) == (204, "OPTIONS, POST")
        assert "access-control-allow-origin" not in response.headers, "CORS is off"
        assert (await client.options("/nothing")).status_code == 404


async def test_head_is_get_without_a_body(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/v1/models", "/metrics"):
        response = await client.head(path)
        assert (response.status_code, response.content) == (200, b"")


async def test_cors_answers_the_origins_it_knows(engine: FakeEngine) -> None:
    async with client_for(engine, cors_origins=("http://page",), api_key=KEYS) as client:
        preflight = {"origin": "http://page", "access-control-request-method": "POST"}
        response = await client.options("/v1/chat/completions", headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://page"
        response = await client.options(
            "/v1/chat/completions", headers=preflight | {"origin": "http://other"}
        )
        assert response.status_code == 400
        assert "access-control-allow-origin" not in response.headers
        assert "Origin" in response.headers["vary"]
        assert ErrorResponse.model_validate(response.json()).error.message == "Disallowed CORS origin."
        response = await client.options(
            "/v1/messages", headers=preflight | {"access-control-request-method": "DELETE"}
        )
        assert response.status_code == 400
        assert AnthropicError.model_validate(response.json()).error.message == "Disallowed CORS method."
        private = {"access-control-request-private-network": "true"}
        for origin, allowed in (("http://page", "true"), ("http://other", None)):
            response = await client.options(
                "/v1/chat/completions", headers=preflight | private | {"origin": origin}
            )
            assert response.headers.get("access-control-allow-private-network") == allowed
        response = await client.options("/v1/models", headers={"origin": "http://page"})
        assert (response.status_code, response.headers["allow"]) == (204, "GET, HEAD, OPTIONS"), (
            "no preflight"
        )
        response = await client.post("/v1/chat/completions", headers={"origin": "http://page"})
        assert response.status_code == 401
        assert response.headers["access-control-allow-origin"] == "http://page", "pages can read errors"
        exposed = response.headers["access-control-expose-headers"].lower().split(", ")
        assert set(exposed) == {
            "x-request-id",
            "request-id",
            "retry-after",
            "x-misspelled-fields",
        }


async def test_slashes_that_a_base_url_adds_change_nothing(client: httpx.AsyncClient) -> None:
    for endpoint in ENDPOINTS:
        path = endpoint.paths[0].replace("{model:path}", MODEL_NAME)
        if path == "/live_stats":  # it does not end
            continue
        responses = [
            await client.request(endpoint.method, target, json=endpoint.example)
            for target in (path, f"{path.rstrip('/')}/", f"http://test/{path.replace('/', '//')}")
        ]
        statuses = {response.status_code for response in responses}
        assert len(statuses) == 1 and 404 not in statuses, (path, statuses)
        assert not any("location" in response.headers for response in responses)
    for path in ("/v1/nothing/", "http://test//v1/nothing"):
        response = await client.post(path)
        assert response.status_code == 404, path
        assert response.json()["error"]["code"] == "unknown_url", response.text


@pytest.mark.parametrize(
    ("path", "is_anthropic"),
    [
        ("/v1/messages/batches", True),
        ("/v1/messages/batches/1/results", True),
        ("/v1/messages/count_tokens/x", True),
        ("/v1/messages/", True),
        ("/v1/messagesx", False),
        ("/v1/nothing", False),
        ("/nothing", False),
    ],
)
async def test_unknown_paths_have_the_envelope_of_the_api_above(
    client: httpx.AsyncClient, path: str, is_anthropic: bool
) -> None:
    response = await client.get(path)
    assert response.status_code in (404, 405)
    (AnthropicError if is_anthropic else ErrorResponse).model_validate(response.json())
