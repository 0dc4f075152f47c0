"""Tools as text, for templates that have no place for them."""

import json

import pytest

from engine.control_tokens import OwnText
from server.parsing.formats import tool_formats
from server.parsing.tools_in_prompt import EXAMPLE, can_ask_for, with_instructions
from tests.server.parsing.texts import make, parse

TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
HERMES, DEEPSEEK = tool_formats()["hermes"], tool_formats()["deepseek_v3"]
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize("takes_system", [True, False])
def test_the_first_turn_gets_the_tools_or_is_made_for_them(takes_system: bool) -> None:
    first = {"role": "system", "content": "Be brief."} if takes_system else USER
    rendered = with_instructions([first, USER], [TOOL], HERMES, takes_system=takes_system)
    assert [turn["role"] for turn in rendered] == [first["role"], "user"]
    text = "".join(rendered[0]["content"])
    assert text.startswith(f"{first['content']}\n\n")
    assert json.dumps(TOOL["function"]) in text.split("\n")
    made, last = with_instructions(
        [USER if takes_system else {"role": "assistant", "content": "b"}],
        [TOOL],
        HERMES,
        takes_system=takes_system,
    )
    assert made["role"] == ("system" if takes_system else "user")
    assert last in (USER, {"role": "assistant", "content": "b"})


def test_only_the_example_of_a_call_has_control_tokens() -> None:
    [turn, _] = with_instructions([USER], [TOOL], DEEPSEEK, takes_system=True)
    [own] = [part for part in turn["content"] if isinstance(part, OwnText)]
    assert own == (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>the_function<｜tool▁sep｜>"
        '{"parameter": "value"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )


CALLS = [EXAMPLE, {"name": "now", "arguments": {"a": [1, "x", None], "é": {"b": True}}}]


@pytest.mark.parametrize("name", [name for name, parser in tool_formats().items() if can_ask_for(parser)])
def test_calls_are_written_as_they_are_read(name: str) -> None:
    text = tool_formats()[name].write_calls(CALLS)
    assert text is not None
    found = [(call.name, json.loads(call.arguments)) for call in parse(make(name), text).calls]
    assert found == [(call["name"], call["arguments"]) for call in CALLS], text


def test_the_formats_of_templates_without_a_place_for_tools_can_be_asked_for() -> None:
    assert all(map(can_ask_for, (HERMES, DEEPSEEK, tool_formats()["pythonic"], tool_formats()["mistral"])))
    assert not can_ask_for(tool_formats()["harmony"])
