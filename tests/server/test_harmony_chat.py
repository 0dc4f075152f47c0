"""Chats with gpt-oss' channels: what clients see, and what the engine is given."""

from collections.abc import AsyncIterator

import httpx
import pytest

from engine.control_tokens import MARK
from server.parsing.formats.harmony import HarmonyParser
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine, FakeTokenizer
from tests.server.tool_chat import URL, answer, chunks

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
FINAL = "<|channel|>final<|message|>4"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


def marked(text: str) -> str:
    return text.replace("<|", f"{MARK}<|")


@pytest.fixture
async def client(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    tokens = {text: 200_000 + number for number, text in enumerate(HarmonyParser.markers)}
    monkeypatch.setattr(FakeTokenizer, "added_tokens", tokens)
    engine.tokenizer.chat_template = (
        "{{ messages }}{{ tools }}<|start|>assistant<|channel|>analysis<|message|>"
    )
    async with client_for(engine) as found:
        yield found


async def test_an_answer_has_reasoning_a_preamble_and_a_call(client: httpx.AsyncClient) -> None:
    say = marked(THOUGHT + PREAMBLE + CALL)
    whole = await answer(client, say)
    [choice] = whole["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "I look.")
    assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert choice["finish_reason"] == "tool_calls"
    counted = marked(THOUGHT).index("<|start|>") - 1
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == counted
    deltas = [chunk["choices"][0]["delta"] for chunk in await chunks(client, say)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert "".join(part["function"]["arguments"] for part in parts) == '{"city": "Paris"}'


async def test_channels_are_read_without_tools_too(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": f"say:{marked(THOUGHT + FINAL)}"}]
    for fields, reasoning, content in (
        ({}, "Hm.", "4"),
        ({"include_reasoning": False}, None, "4"),
        ({"separate_reasoning": False}, None, "Hm.\n\n4"),
    ):
        response = await client.post(URL, json={"messages": messages, **fields})
        message = response.json()["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
    assert {text for _, text in engine.requests[-1].sampling.marks} == set(HarmonyParser.markers)


async def test_what_constrains_the_answer_leaves_its_reasoning_free(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for fields, has_calls in (
        ({"response_format": SCHEMA, "tools": None}, False),
        ({"guided_regex": "[0-9]", "tools": None}, False),
        ({"response_format": SCHEMA}, True),
        ({"tool_choice": "required"}, True),
    ):
        await answer(client, marked(CALL), **fields)
        grammar = engine.requests[-1].sampling.grammar
        assert grammar is not None and grammar.includes_reasoning
        rules = grammar.around + grammar.source
        assert "thought: " in rules and ("to=functions." in rules) is has_calls


async def test_a_turn_that_is_continued_has_no_headers(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "say: and 5"}]
    request = {"messages": messages, "continue_final_message": True, "response_format": SCHEMA}
    message = (await client.post(URL, json=request)).json()["choices"][0]["message"]
    assert message["content"] == " and 5"
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None and not grammar.includes_reasoning


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reasoning_parser": "none"}, {"content": "Hm.\n\n4"}),
        (
            {"reasoning_parser": "harmony", "tool_parser": "none"},
            {"content": "4", "reasoning_content": "Hm."},
        ),
        (
            {"tool_parser": "harmony", "reasoning_parser": "think"},
            {"content": "4", "reasoning_content": "Hm."},
        ),
    ],
)
async def test_settings_choose_the_format(
    engine: FakeEngine, settings: dict[str, str], message: dict[str, str]
) -> None:
    engine.tokenizer.chat_template = (
        "{{ messages }}{{ tools }}<|start|>assistant<|channel|>analysis<|message|>"
    )
    messages = [{"role": "user", "content": f"say:{THOUGHT}{FINAL}"}]
    async with client_for(engine, **settings) as client:
        found = (await client.post(URL, json={"messages": messages})).json()["choices"][0]["message"]
    assert message.items() <= found.items()
    assert ("reasoning_content" in found) is ("reasoning_content" in message)
