"""Calls of tools in chat: whole, streamed, and what the engine and the template are told."""

from typing import Any

import httpx
import pytest

from engine.control_tokens import MARK
from engine.request import ReasoningSpan
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine
from tests.server.tool_chat import CALL, CALL_NOW, HERMES, NOW, TOOL, URL, answer, chunks

pytestmark = pytest.mark.usefixtures("calls_and_thinks")


# Answers


async def test_a_call_stands_in_the_message(client: httpx.AsyncClient) -> None:
    choice = (await answer(client, f"I look.\n{CALL}\n{CALL_NOW}"))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "I look."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2 and all(call_id.startswith("call_") for call_id in ids)


async def test_without_words_the_content_is_null_and_without_calls_there_is_no_list(
    client: httpx.AsyncClient,
) -> None:
    message = (await answer(client, CALL))["choices"][0]["message"]
    assert message["content"] is None
    choice = (await answer(client, "No need."))["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "No need.", "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_what_is_no_call_is_content(client: httpx.AsyncClient) -> None:
    for say in ("<tool_call>oops</tool_call>", "a <tool_call", '<tool_call>{"name": 1}</tool_call>'):
        choice = (await answer(client, say))["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (say, "stop")


async def test_an_answer_cut_in_a_call_keeps_its_length_visible(client: httpx.AsyncClient) -> None:
    choice = (await answer(client, CALL, max_tokens=60))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert '{"city": "Paris"}'.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


async def test_a_stop_string_in_a_call_is_no_call(client: httpx.AsyncClient) -> None:
    choice = (await answer(client, CALL, stop=["r"]))["choices"][0]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_without_parallel_calls_the_answer_ends_after_the_first(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    say = f"{CALL}\n{CALL_NOW}" + " and more" * 100
    if stream:
        parsed = await chunks(client, say, parallel_tool_calls=False)
        names = [
            call["function"]["name"]
            for chunk in parsed
            for call in chunk["choices"][0]["delta"].get("tool_calls", ())
            if "name" in call["function"]
        ]
        assert names == ["get_weather"]
        finish = parsed[-1]["choices"][0]["finish_reason"]
    else:
        choice = (await answer(client, say, parallel_tool_calls=False))["choices"][0]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
        finish = choice["finish_reason"]
    assert finish == "tool_calls"
    assert engine.aborted, "the rest is not computed"
    assert not engine.live


# Streams


async def test_a_streamed_call_tells_its_name_once_and_its_arguments_in_pieces(
    client: httpx.AsyncClient,
) -> None:
    say = f"<think>\nHm.\n</think>\nI look.\n{CALL}\n{CALL_NOW}"
    parsed = await chunks(client, say, stream_options={"include_usage": True})
    assert parsed[-1]["choices"] == [] and parsed[-1]["usage"]["completion_tokens"] == len(say)
    deltas = [chunk["choices"][0]["delta"] for chunk in parsed[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert not any("role" in delta for delta in deltas[1:])
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    begun = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]) for call in begun] == [
        (0, "function", {"name": "get_weather", "arguments": ""}),
        (1, "function", {"name": "now", "arguments": ""}),
    ]
    more = [call for call in calls if "id" not in call]
    assert all(
        call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} for call in more
    )
    for index, arguments in enumerate(['{"city": "Paris"}', "{}"]):
        pieces = [call["function"]["arguments"] for call in more if call["index"] == index]
        assert "".join(pieces) == arguments
        assert len(pieces) > 1, "as they are written"
    assert [chunk["choices"][0]["finish_reason"] for chunk in parsed[:-1]].count(None) == len(deltas) - 1
    assert parsed[-2]["choices"][0]["finish_reason"] == "tool_calls"


async def test_stream_and_answer_say_the_same(client: httpx.AsyncClient) -> None:
    say = f"<think>Hm.</think>A {CALL} B <tool_call>no {CALL_NOW}"
    message = (await answer(client, say))["choices"][0]["message"]
    deltas = [chunk["choices"][0]["delta"] for chunk in await chunks(client, say)]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
    for index, call in enumerate(message["tool_calls"]):
        pieces = [
            piece["function"]["arguments"]
            for delta in deltas
            for piece in delta.get("tool_calls", ())
            if piece["index"] == index
        ]
        assert "".join(pieces) == call["function"]["arguments"]


async def test_every_choice_has_a_parser_of_its_own(client: httpx.AsyncClient) -> None:
    parsed = await chunks(client, CALL, n=3)
    ids: dict[int, set[str]] = {0: set(), 1: set(), 2: set()}
    for chunk in parsed:
        choice = chunk["choices"][0]
        for call in choice["delta"].get("tool_calls", ()):
            assert call["index"] == 0
            if "id" in call:
                ids[choice["index"]].add(call["id"])
    assert all(len(found) == 1 for found in ids.values())
    assert len(set.union(*ids.values())) == 3


async def test_counts_go_along_when_asked_for(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    parsed = await chunks(client, f"<think>a</think>{CALL}", stream_options=options)
    assert all(chunk["usage"] is not None for chunk in parsed)


async def test_chunks_of_content_are_the_plain_ones_while_nothing_is_parsed(
    client: httpx.AsyncClient,
) -> None:
    with_parser = await chunks(client, "plain text")
    client_fields = {"separate_reasoning": False, "tool_choice": "none"}
    without = await chunks(client, "plain text", **client_fields)

    def bare(chunk: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in chunk.items() if name not in ("id", "created")}

    joined = [
        "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in found)
        for found in (with_parser, without)
    ]
    assert joined == ["plain text", "plain text"]
    assert bare(with_parser[1]).keys() == bare(without[1]).keys()


# What the engine and the template are told


async def test_control_tokens_are_told_to_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.tokenizer.added_tokens = {"<tool_call>": 7, "</tool_call>": 8, "<think>": 9, "<other>": 10}
    async with client_for(engine) as client:
        say = f"<think>as text{MARK}{CALL}".replace("</tool_call>", f"{MARK}</tool_call>")
        message = (await answer(client, say))["choices"][0]["message"]
        assert message["content"] == "<think>as text"
        assert len(message["tool_calls"]) == 1
    sampling = engine.requests[-1].sampling
    assert set(sampling.marks) == {(7, "<tool_call>"), (8, "</tool_call>"), (9, "<think>")}
    assert sampling.reasoning == ReasoningSpan(f"{MARK}<think>", "</think>")
    assert sampling.skip_special_tokens is True


async def test_a_plain_chat_is_left_alone(engine: FakeEngine) -> None:
    engine.tokenizer.chat_template = HERMES
    async with client_for(engine) as client:
        await client.post(URL, json={"messages": [{"role": "user", "content": "a"}], "tools": []})
    sampling = engine.requests[-1].sampling
    assert (sampling.marks, sampling.reasoning) == ((), None)
    assert "tools" not in engine.tokenizer.chats[-1][1]["template_kwargs"]


async def test_tools_reach_the_template_in_its_own_words(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    tools = [{**TOOL, "function": {**TOOL["function"], "strict": True}, "x": 1}, NOW]
    await answer(client, "a", *tools)
    told = engine.tokenizer.chats[-1][1]["template_kwargs"]["tools"]
    empty = {"type": "object", "properties": {}}
    assert told == [TOOL, {"type": "function", "function": {"name": "now", "parameters": empty}}]


async def test_a_template_without_a_place_for_tools_is_told_in_text(engine: FakeEngine) -> None:
    engine.tokenizer.chat_template = "{{ messages }}"
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
        {"role": "user", "content": f"say:{CALL_NOW}"},
    ]
    async with client_for(engine) as client:
        response = await client.post(URL, json={"messages": messages, "tools": [TOOL, NOW]})
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    turns, options = engine.tokenizer.chats[-1]
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user", "user"]
    assert '"name": "get_weather"' in "".join(turns[0]["content"])
    assert turns[2] == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    }
    assert turns[3]["content"] == "<tool_response>\nnoon\n</tool_response>"
    assert "tools" not in options["template_kwargs"]
