"""Bad input, faults and deadlines in the Responses API."""

from typing import Any

import httpx
import pytest

from server.schema.errors import ErrorResponse
from server.schema.responses import LOGPROBS_INCLUDED
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine
from tests.server.responses_api import CODEX_TOOLS, PATH, ask, stream


async def test_a_reference_to_an_item_is_refused_with_what_to_send(client: httpx.AsyncClient) -> None:
    items = [{"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": "hi"}]
    response = await client.post(PATH, json={"input": items})
    assert response.status_code == 400
    assert "each item itself instead of its id" in response.json()["error"]["message"]


NESTED: list[Any] = []
for _ in range(300):
    NESTED = [NESTED]
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": "a\0"}, "input[0].content[0]"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "wizard", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].name"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f\0", "arguments": ""}]}, "input[0].name"),
    ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
    ({"input": [{"type": "web_search_call"}]}, "input"),
    ({"input": [{"type": "web_search_call"}, {"role": "user"}]}, "input[1].content"),
    ({"input": [{"type": "custom_tool_call", "call_id": "1", "name": "f"}]}, "input[0].input"),
    ({"input": [{"type": "shell_call", "call_id": "1", "action": "ls"}]}, "input[0].action"),
    ({"input": [{"type": "shell_call_output", "call_id": "1", "output": [NESTED]}]}, "input[0].output"),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
    ({"input": "x" * 5000}, "input"),
    ({"input": "x" * 9000}, "input"),
    ({"input": "bad template"}, "input"),
    ({"input": "a", "instructions": 5}, "instructions"),
    ({"input": "a", "instructions": "\0"}, "instructions"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "a", "max_output_tokens": 4096}, "max_output_tokens"),
    ({"input": "a", "max_tokens": 5}, "max_tokens"),
    ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
    ({"input": "a", "temperature": 3}, "temperature"),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "a", "conversation": "conv_1"}, "conversation"),
    ({"input": "a", "background": True}, "background"),
    ({"input": "a", "prompt": {"id": "p"}}, "prompt"),
    ({"input": "a", "tools": [{"type": "x", "name": "f", "parameters": {}}]}, "tools[0].type"),
    ({"input": "a", "tools": [{"type": 5}]}, "tools[0].type"),
    ({"input": "a", "tools": CODEX_TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"input": "a", "tools": CODEX_TOOLS, "tool_choice": "required"}, "tool_choice"),
    (
        {"input": "a", "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": CODEX_TOOLS}},
        "tool_choice.tools",
    ),
    (
        {"input": "a", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "tool_choice.tools",
    ),
    ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name"),
    ({"input": "a", "tools": [{"type": "function", "name": "f g"}]}, "tools[0].name"),
    ({"input": "a", "tools": [{"type": "function", "name": "f"}] * 2}, "tools"),
    ({"input": "a", "tool_choice": "required"}, "tool_choice"),
    ({"input": "a", "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"input": "a", "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
    ({"input": "a", "max_tool_calls": 1}, "max_tool_calls"),
    ({"input": "a", "truncation": "auto"}, "truncation"),
    ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"input": "a", "top_logprobs": 3}, "top_logprobs"),
    ({"input": "a", "top_logprobs": 21, "include": [LOGPROBS_INCLUDED]}, "top_logprobs"),
    ({"input": "a", "n": 2}, "n"),
    ({"input": "a", "reasoning": {"effort": "enormous"}}, "reasoning.effort"),
    ({"input": "a", "metadata": {"a": 1}}, "metadata.a"),
    ({"input": "a", "logit_bias": {"99999999": 1}}, "logit_bias"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=[f"{n}-{param}" for n, (_, param) in enumerate(BAD)])
@pytest.mark.parametrize("streaming", [False, True])
async def test_bad_input_is_named(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str, streaming: bool
) -> None:
    response = await client.post(PATH, json={"stream": streaming} | fields)
    assert response.status_code == 400, response.text[:500]
    error = ErrorResponse.model_validate(response.json()).error
    assert error.param == param, error
    assert not engine.requests


async def test_neutral_values_are_accepted(client: httpx.AsyncClient) -> None:
    await ask(
        client,
        input="a",
        store=True,
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=False,
        previous_response_id=None,
        background=False,
        truncation="disabled",
        text={"format": {"type": "text"}, "verbosity": "low"},
        include=["reasoning.encrypted_content"],
        service_tier="auto",
        user="u",
        stream_options=None,
    )


async def test_a_fault_in_the_stream_is_its_last_event(client: httpx.AsyncClient) -> None:
    events = await stream(client, input="tokens=5 fail=2 delay=0.002")
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {
        "code": "server_error",
        "message": "Computing this request failed.",
    }
    response = await client.post(PATH, json={"input": "fail=1"})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")


async def test_a_deadline_in_the_stream_is_its_last_event(engine: FakeEngine) -> None:
    async with client_for(engine, request_timeout_seconds=0.5) as client:
        events = await stream(client, input="tokens=4000 delay=0.1")
    assert events[-1]["type"] == "response.failed"
    assert not engine.live
