"""Reasoning and calls of tools in the Responses API."""

from typing import Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.responses_api import CODEX_TOOLS, PATH, ask, stream
from tests.server.tool_chat import CALL, CALL_NOW

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
NOW = {"type": "function", "name": "now"}
SAY = f"say:<think>Hm.</think>I look.\n{CALL}\n{CALL_NOW}"
SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}


async def test_thoughts_and_calls_are_items_of_their_own(thinker: httpx.AsyncClient) -> None:
    answer = await ask(thinker, input=SAY, tools=[WEATHER, NOW])
    thought, said, weather, now = answer["output"]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert (said["type"], said["content"][0]["text"]) == ("message", "I look.")
    assert (weather["type"], weather["name"], weather["arguments"]) == (
        "function_call",
        "get_weather",
        '{"city": "Paris"}',
    )
    assert (now["name"], now["arguments"]) == ("now", "{}")
    assert {item["status"] for item in answer["output"]} == {"completed"}
    assert len({item["id"] for item in answer["output"]}) == 4
    assert weather["call_id"] != now["call_id"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == len("<think>Hm.</think>")
    assert answer["tools"][1] == NOW | {"description": None, "parameters": None, "strict": False}


async def test_streamed_items_begin_grow_and_end_one_after_the_other(thinker: httpx.AsyncClient) -> None:
    events = await stream(thinker, input=SAY, tools=[WEATHER, NOW])
    output = events[-1]["response"]["output"]
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in output] == kinds
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
    names = {
        "reasoning": "reasoning_text",
        "message": "output_text",
        "function_call": "function_call_arguments",
    }
    for index, item in enumerate(output):
        own = [event for event in events if event.get("output_index") == index]
        assert own == events[events.index(own[0]) : events.index(own[-1]) + 1], "items do not mix"
        name = f"response.{names[item['type']]}"
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        pieces = [event["delta"] for event in own if event["type"] == f"{name}.delta"]
        assert "".join(pieces) == text and len(pieces) > 1
        [done] = [event for event in own if event["type"] == f"{name}.done"]
        assert done["arguments" if item["type"] == "function_call" else "text"] == text
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}


@pytest.mark.parametrize("limit", [5, 25, 80])
async def test_only_the_item_in_which_an_answer_is_cut_is_incomplete(
    thinker: httpx.AsyncClient, limit: int
) -> None:
    fields = {"input": SAY, "tools": [WEATHER, NOW], "max_output_tokens": limit}
    answer = await ask(thinker, **fields)
    statuses = [item["status"] for item in answer["output"]]
    assert statuses == ["completed"] * (len(statuses) - 1) + ["incomplete"]
    events = await stream(thinker, **fields)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in done] == statuses
    assert done == events[-1]["response"]["output"]


async def test_choices_of_tools_act(thinker: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields = {"input": f"say:{CALL}\n{CALL_NOW}", "tools": [WEATHER, NOW]}
    one = await ask(thinker, **fields, parallel_tool_calls=False)
    assert [item["name"] for item in one["output"]] == ["get_weather"]
    told = engine.tokenizer.chats[-1][1]["template_kwargs"]["tools"]
    assert told[0]["function"]["description"] == "Weather of a city."
    none = await ask(thinker, **fields, tool_choice="none")
    assert ([item["type"] for item in none["output"]], none["tool_choice"]) == (["message"], "none")
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        forced = await ask(thinker, **fields, tool_choice=choice)
        assert (forced["output"][0]["name"], forced["tool_choice"]) == ("get_weather", choice)
        assert engine.requests[-1].sampling.grammar is not None
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
    some = await ask(thinker, **fields, tool_choice=allowed)
    assert [item.get("name") for item in some["output"]] == [None, "now"]
    assert some["tool_choice"] == allowed


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "now"}])
async def test_a_forced_call_that_is_cut_before_it_begins_is_no_item(
    thinker: httpx.AsyncClient, choice: Any
) -> None:
    fields = {"input": f"say:{CALL_NOW}", "tools": [NOW], "tool_choice": choice, "max_output_tokens": 4}
    answer = await ask(thinker, **fields)
    assert (answer["output"], answer["status"]) == ([], "incomplete")
    kinds = [event["type"] for event in await stream(thinker, **fields)]
    assert kinds == ["response.created", "response.in_progress", "response.incomplete"]


@pytest.mark.parametrize("choice", [{"type": "web_search"}, {"type": "function", "name": "nope"}])
async def test_a_choice_of_a_tool_that_is_left_out_says_so(client: httpx.AsyncClient, choice: Any) -> None:
    response = await client.post(
        PATH, json={"input": "a", "tools": [{"type": "web_search"}], "tool_choice": choice}
    )
    assert response.status_code == 400
    assert "are left out and cannot be demanded" in response.json()["error"]["message"]


@pytest.mark.parametrize("streaming", [False, True])
async def test_tools_that_are_no_functions_are_left_out(
    thinker: httpx.AsyncClient, engine: FakeEngine, streaming: bool
) -> None:
    names = [{"type": "web_search"}, {"type": "function", "name": "shell"}]
    for tools, choice, kept in (
        ([*CODEX_TOOLS, SHELL], "auto", ["shell"]),
        ([*CODEX_TOOLS, SHELL], {"type": "allowed_tools", "mode": "auto", "tools": names}, ["shell"]),
        (CODEX_TOOLS, "auto", []),
        (CODEX_TOOLS, {"type": "allowed_tools", "mode": "auto", "tools": CODEX_TOOLS}, []),
    ):
        fields = {"input": "a", "tools": tools, "tool_choice": choice}
        response = (
            (await stream(thinker, **fields))[-1]["response"] if streaming else await ask(thinker, **fields)
        )
        assert [tool["name"] for tool in response["tools"]] == kept
        listed = engine.tokenizer.chats[-1][1]["template_kwargs"].get("tools", ())
        assert [tool["function"]["name"] for tool in listed] == kept
