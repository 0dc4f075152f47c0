"""Tools, calls and results as text, for templates that have no place for them."""

import json

from server.parsing.tools_in_prompt import call_text, render_tools
from tests.server.parsing.texts import make, parse

TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def test_a_plain_conversation_stays_as_it_is() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "name": "x"}]
    assert render_tools(turns, ()) == turns


def test_the_system_turn_gets_the_tools_or_is_made_for_them() -> None:
    rendered = render_tools(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}], [TOOL]
    )
    assert [turn["role"] for turn in rendered] == ["system", "user"]
    assert rendered[0]["content"].startswith("Be brief.\n\n")
    assert json.dumps(TOOL["function"]) in rendered[0]["content"].split("\n")
    assert render_tools([{"role": "user", "content": "a"}], [TOOL])[0]["role"] == "system"


def test_results_in_a_row_are_one_turn_of_the_user() -> None:
    calls = [{"id": name, "function": {"name": name, "arguments": {"a": "é"}}} for name in ("f", "g")]
    turns = [
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "f", "content": "1"},
        {"role": "tool", "tool_call_id": "g", "content": "2"},
    ]
    rendered = render_tools(turns, ())
    assert rendered == [
        {
            "role": "assistant",
            "content": "I look."
            '\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
            '\n<tool_call>\n{"name": "g", "arguments": {"a": "é"}}\n</tool_call>',
        },
        {
            "role": "user",
            "content": "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>",
        },
    ]
    assert "tool_calls" in turns[0], "what was given is not changed"


def test_a_call_is_written_as_it_is_read() -> None:
    [call] = parse(make("hermes"), call_text({"name": "now", "arguments": {"a": [1, "x"]}})).calls
    assert (call.name, call.arguments) == ("now", '{"a": [1, "x"]}')
