"""Bad input, faults and deadlines in the Anthropic API."""

from typing import Any

import httpx
import pytest

from server.schema.errors import AnthropicError
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine
from tests.server.messages_api import NOW, PATH, SEARCH, ask, body, stream


def block(kind: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"type": kind, **fields}]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": "a"}]}, "max_tokens"),
    (body(max_tokens=-1), "max_tokens"),
    (body(max_tokens="5"), "max_tokens"),
    ({"max_tokens": 5}, "messages"),
    (body(messages=[]), "messages"),
    (body(messages=[{"role": "tool", "content": "a"}]), "messages[0].role"),
    (
        body(messages=[{"role": "system", "content": block("tool_result", tool_use_id="1")}]),
        "no place in a message of the system",
    ),
    (body(messages=[{"role": "user"}]), "messages[0].content"),
    (body(None), "messages[0].content"),
    (body(5), "messages[0].content"),
    (body("a\0"), "messages[0].content[0].text"),
    (body(block("text")), "messages[0].content[0].text"),
    (body(block("image", source={})), "'image' are not supported"),
    (body(block("document", source={})), "'document' are not supported"),
    (body(block("hologram")), "messages[0].content[0].type"),
    (body(block("tool_use", id="1", name="f", input={})), "no place in a message of the user"),
    (body(block("tool_result")), "tool_use_id"),
    (body(block("tool_result", tool_use_id="1", content=block("image"))), "'image' are not supported"),
    (body(block("tool_result", tool_use_id="1", content="\0")), "content[0].content[0].text"),
    (
        body(block("tool_result", tool_use_id="1", content=block("tool_result", tool_use_id="2"))),
        "must be text",
    ),
    (
        body(
            messages=[
                {"role": "assistant", "content": block("tool_use", id="1", name="f", input={"a": "\0"})}
            ]
        ),
        "messages[0].content[0].input",
    ),
    (
        body(messages=[{"role": "assistant", "content": block("tool_result", tool_use_id="1")}]),
        "no place in a message of the assistant",
    ),
    (body(system=5), "system"),
    (body(system=block("image")), "system[0].type"),
    (body(system="a\0"), "system[0].text"),
    (body(temperature=3), "temperature"),
    (body(top_k=-2), "top_k"),
    (body(stop_sequences=[""]), "stop_sequences"),
    (body(stop_sequences=["a\0"]), "stop_sequences"),
    (body(stop=["a"]), "stop is not supported: use stop_sequences"),
    (body(n=2), "n is not supported"),
    (body(chat_template_kwargs={"a": 1}), "it is a field of chat"),
    (body(add_generation_prompt=False), "add_generation_prompt is not supported"),
    (body(stream=1), "stream"),
    (body(thinking={"type": "enabled", "budget_tokens": 0}), "thinking.budget_tokens"),
    (body(thinking={"type": "x"}), "thinking"),
    (body(output_config={"format": {"type": "json_schema"}}), "output_config.format.schema"),
    (body(tools=[{"name": "f"}]), "tools[0].input_schema"),
    (body(tools=[{"name": "f g", "input_schema": {}}]), "tools[0].name"),
    (body(tools=[{"name": "f", "input_schema": {}}] * 2), "names of tools must differ"),
    (body(tools=[{"type": "x", "name": "f", "input_schema": {}}]), "tools[0].type"),
    (body(tools=[SEARCH], tool_choice={"type": "any"}), "tool_choice needs tools"),
    (body(tools=[SEARCH], tool_choice={"type": "tool", "name": "nope"}), "left out and cannot be demanded"),
    (body(tools=[SEARCH, NOW], tool_choice={"type": "tool", "name": "web_search"}), "'web_search'"),
    (body(tool_choice={"type": "any"}), "tool_choice needs tools"),
    (body(tool_choice={"type": "tool"}, tools=[{"name": "f", "input_schema": {}}]), "tool_choice.name"),
    (body(tool_choice={"type": "tool", "name": "g"}, tools=[{"name": "f", "input_schema": {}}]), "'g'"),
    (body(mcp_servers=[{}]), "mcp_servers is not supported"),
    (body(container="x"), "container is not supported"),
    (body(response_format={"type": "json_object"}), "response_format is not supported"),
    (body("x" * 5000), "prompt is too long: This model's maximum context length is 4096 tokens"),
    (body("x" * 9000), "prompt is too long"),
    (body("bad template"), "chat template refuses"),
    (body(logit_bias={"99999999": 1}), "logit_bias"),
    (
        body(messages=[{"role": "user", "content": block("tool_result", tool_use_id="1") * 4000}] * 2),
        "messages",
    ),
]


@pytest.mark.parametrize(
    ("fields", "words"), BAD, ids=[f"{n}-{words[:20]}" for n, (_, words) in enumerate(BAD)]
)
@pytest.mark.parametrize("streaming", [False, True])
async def test_bad_input_is_named(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], words: str, streaming: bool
) -> None:
    response = await client.post(PATH, json={"stream": streaming} | fields)
    assert response.status_code == 400, response.text[:500]
    error = AnthropicError.model_validate(response.json()).error
    assert error.type == "invalid_request_error"
    assert words in error.message
    assert len(response.content) < 2000
    assert not engine.requests


async def test_neutral_values_are_accepted(client: httpx.AsyncClient) -> None:
    await ask(
        client,
        **body(
            tools=[],
            tool_choice={"type": "auto"},
            metadata={"user_id": "x"},
            service_tier="auto",
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            n=1,
            stream_options=None,
            top_k=0,
        ),
    )


async def test_errors_have_the_envelope_wherever_they_come_from(engine: FakeEngine) -> None:
    async with client_for(engine, api_key=("k",), max_body_bytes=2000) as client:
        for path in (PATH, f"{PATH}/count_tokens"):
            key = {"x-api-key": "k"}
            for status, kind, response in (
                (401, "authentication_error", await client.post(path, json=body())),
                (401, "authentication_error", await client.post(path, headers={"x-api-key": "wrong"})),
                (413, "request_too_large", await client.post(path, content=b" " * 3000, headers=key)),
                (405, "invalid_request_error", await client.get(path, headers=key)),
                (404, "not_found_error", await client.post(path, json=body(model="x"), headers=key)),
                (400, "invalid_request_error", await client.post(path, content=b"{", headers=key)),
            ):
                assert response.status_code == status, response.text
                assert AnthropicError.model_validate(response.json()).error.type == kind
        assert (await client.post(PATH, json=body(), headers={"x-api-key": "k"})).status_code == 200


async def test_states_of_the_server_have_their_names(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    async def kind() -> tuple[int, str]:
        response = await client.post(PATH, json=body("fail=1"))
        return response.status_code, AnthropicError.model_validate(response.json()).error.type

    assert await kind() == (500, "api_error")
    engine.is_full = True
    assert await kind() == (429, "rate_limit_error")
    engine.is_draining = True
    assert await kind() == (503, "overloaded_error")


async def test_a_fault_in_the_stream_is_its_last_event(client: httpx.AsyncClient) -> None:
    events = await stream(client, **body("tokens=5 fail=2 delay=0.002"))
    assert events[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "Computing this request failed."},
    }
    assert "message_stop" not in [event["type"] for event in events]


async def test_a_deadline_in_the_stream_is_an_error_event(engine: FakeEngine) -> None:
    async with client_for(engine, request_timeout_seconds=0.5) as client:
        events = await stream(client, **body("tokens=100 delay=0.1"))
        assert events[-1]["error"]["type"] == "timeout_error"
    assert not engine.live


async def test_a_quiet_stream_sends_pings(engine: FakeEngine) -> None:
    async with client_for(engine, ping_seconds=0.02) as client:
        events = await stream(client, **body("tokens=2 delay=0.3"))
    assert [event["type"] for event in events].count("ping") >= 3
