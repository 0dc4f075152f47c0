"""Reasoning and calls of tools in the Anthropic API."""

import json
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.messages_api import NOW, PATH, SEARCH, WEATHER, ask, body, stream
from tests.server.tool_chat import CALL, CALL_NOW

BASH = {"type": "bash_20250124", "name": "bash"}
SAY = f"say:<think>Hm.</think>I look.\n{CALL}\n{CALL_NOW}"


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in found.items() if name != "id"} for found in blocks]


async def test_thoughts_and_calls_are_blocks_of_their_own(thinker: httpx.AsyncClient) -> None:
    answer = await ask(thinker, **body(SAY, max_tokens=500, tools=[WEATHER, NOW]))
    assert without_ids(answer["content"]) == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "name": "get_weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "name": "now", "input": {}},
    ]
    assert answer["content"][2]["id"] != answer["content"][3]["id"]
    assert answer["stop_reason"] == "tool_use"


async def test_streamed_blocks_begin_grow_and_stop_one_after_the_other(thinker: httpx.AsyncClient) -> None:
    fields = body(SAY, max_tokens=500, tools=[WEATHER, NOW])
    events = [event for event in await stream(thinker, **fields) if event["type"] != "ping"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            is_open = True
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_stop":
            assert is_open and event["index"] == len(blocks) - 1
            is_open = False
        else:
            assert is_open and event["index"] == len(blocks) - 1
            piece = event["delta"]
            match piece["type"]:
                case "text_delta":
                    blocks[-1]["text"] += piece["text"]
                case "thinking_delta":
                    blocks[-1]["thinking"] += piece["thinking"]
                case "input_json_delta":
                    blocks[-1]["json"] += piece["partial_json"]
    assert not is_open
    for found in blocks:
        if said := found.pop("json"):
            found["input"] = json.loads(said)
    assert without_ids(blocks) == without_ids((await ask(thinker, **fields))["content"])


async def test_a_call_that_is_cut_has_no_input(thinker: httpx.AsyncClient) -> None:
    answer = await ask(thinker, **body(f"say:{CALL}", max_tokens=60, tools=[WEATHER]))
    assert (answer["content"][0]["input"], answer["stop_reason"]) == ({}, "max_tokens")


async def test_choices_of_tools_act(thinker: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields = body(f"say:{CALL}\n{CALL_NOW}", max_tokens=500, tools=[WEATHER, NOW])
    one = await ask(thinker, **fields, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["name"] for block in one["content"]] == ["get_weather"]
    told = engine.tokenizer.chats[-1][1]["template_kwargs"]["tools"]
    assert told[0]["function"] == {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": WEATHER["input_schema"],
    }
    for choice, names in (
        ({"type": "any"}, ["get_weather", "now"]),
        ({"type": "tool", "name": "get_weather"}, ["get_weather"]),
    ):
        forced = await ask(thinker, **fields, tool_choice=choice)
        assert ([block["name"] for block in forced["content"]], forced["stop_reason"]) == (names, "tool_use")
        assert engine.requests[-1].sampling.grammar is not None
    none = await ask(thinker, **fields, tool_choice={"type": "none"})
    assert [block["type"] for block in none["content"]] == ["text"]
    assert "tools" not in engine.tokenizer.chats[-1][1]["template_kwargs"]


@pytest.mark.parametrize(("kind", "is_on"), [("enabled", True), ("adaptive", True), ("disabled", False)])
async def test_thinking_is_a_variable_of_the_template(
    thinker: httpx.AsyncClient, engine: FakeEngine, kind: str, is_on: bool
) -> None:
    await ask(thinker, **body(thinking={"type": kind, "budget_tokens": 1024}))
    assert engine.tokenizer.chats[-1][1]["template_kwargs"] == {"enable_thinking": is_on}


async def test_tools_of_the_api_itself_are_left_out(thinker: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields = body(f"say:{CALL_NOW}", max_tokens=500, tools=[SEARCH, BASH, NOW], tool_choice={"type": "any"})
    assert [found["name"] for found in (await ask(thinker, **fields))["content"]] == ["now"]
    listed = engine.tokenizer.chats[-1][1]["template_kwargs"]["tools"]
    assert [tool["function"]["name"] for tool in listed] == ["now"]
    await ask(thinker, **body("say:a", tools=[SEARCH], tool_choice={"type": "auto"}))


async def test_tools_count_as_part_of_the_prompt(thinker: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [WEATHER],
        "tool_choice": {"type": "auto"},
    }
    assert (await thinker.post(f"{PATH}/count_tokens", json=fields)).status_code == 200
    assert engine.tokenizer.chats[-1][1]["template_kwargs"]["tools"][0]["function"]["name"] == "get_weather"
