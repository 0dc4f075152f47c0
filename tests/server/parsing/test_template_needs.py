"""Conversations for templates that read tools, or earlier calls, in a way of their own.

Covers server/parsing/template_needs.py.
"""

import json
from typing import Any

import pytest

from engine.text.chat_template import ChatTemplate
from engine.text.template_sandbox import Rendering
from server.parsing.formats import tool_formats
from server.parsing.template_needs import adapted, reads_tools_of_messages, with_switch
from tests.server.parsing.texts import make, parse

PHI = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if 'tools' in m and m['tools'] is not none %}"
    "<|tool|>{{ m['tools'] }}<|/tool|>{% endif %}{% endfor %}"
)
HARMONY = (
    "{{ tools }}{% for m in messages if m.tool_calls %}{% if m.content and m.thinking %}"
    "{{ raise_exception('both') }}{% endif %}<|channel|>analysis<|message|>{{ m.thinking or m.content }}"
    "{% endfor %}"
)
DISTILL = (
    "{% for message in messages %}{% set m = message %}"
    "{% if m['role'] == 'assistant' and message['content'] is none %}"
    "{% for call in m['tool_calls'] %}<｜tool▁call▁begin｜>{{ call.function.name }}{% endfor %}"
    "{% elif m['role'] == 'assistant' %}[{{ m['content'] }}]{% endif %}{% endfor %}"
)
PARSERS = tool_formats()
TOOL = {"type": "function", "function": {"name": "now", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {"a": "é"}}}


def render(template: str, messages: list[dict[str, Any]]) -> str:
    return ChatTemplate(template).render(
        messages, {}, Rendering(9), add_generation_prompt=True, continue_final_message=False, max_chars=9999
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PHI, True),
        (PHI.replace("m['tools']", "m.tools"), True),
        ("{{ tools }}" + PHI, False),
        ("{% if tools %}{{ message['tools'] }}{% endif %}", False),
        ("{{ messages }}", False),
    ],
)
def test_templates_that_take_tools_from_a_message_are_found(template: str, expected: bool) -> None:
    assert reads_tools_of_messages(template) is expected


def test_tools_become_a_field_of_the_system_message() -> None:
    user = {"role": "user", "content": "Hi"}
    for messages in ([user], [{"role": "system", "content": "Be brief."}, user]):
        turns = adapted(PHI, messages, [TOOL], PARSERS["phi4_mini"])
        listed = render(PHI, turns).partition("<|tool|>")[2].partition("<|/tool|>")[0]
        assert json.loads(listed) == [TOOL["function"]]
        assert turns[0]["content"] == (messages[0]["content"] if messages[0] != user else turns[0]["content"])
        assert "tools" not in messages[0], "the request is left as it is"
    assert adapted(PHI, [user], [], PARSERS["phi4_mini"]) == [user]


@pytest.mark.parametrize(
    ("template", "name", "is_text"),
    [
        (PHI, "phi4_mini", True),
        ("{{ tools }}", "granite", True),
        ("{{ tools }}", "pythonic", True),
        ("{{ tools }}{{ m.tool_calls }}", "granite", False),
        ("{{ tools }}", "glm45", False),  # which only templates write
        ("{{ m.content }}", "hermes", True),
        ("{{ m.tool_calls }}{{ '<｜tool▁call▁begin｜>' }}", "deepseek_v3", False),
        ("{{ m.tool_calls }}{{ '<｜tool▁call▁begin｜>' }}", "hermes", True),
    ],
)
def test_calls_that_a_template_leaves_out_become_text_that_the_parser_reads(
    template: str, name: str, is_text: bool
) -> None:
    turn = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
    [rendered] = adapted(template, [turn], [], PARSERS[name])
    assert "tool_calls" in turn, "the request is left as it is"
    if not is_text:
        assert rendered == turn
        return
    message = parse(make(name), rendered["content"])
    [call] = message.calls
    assert (message.content, call.name, json.loads(call.arguments)) == ("I look.", "now", {"a": "é"})
    assert "tool_calls" not in rendered


def test_results_in_a_row_are_one_turn_of_the_user_where_calls_are_text() -> None:
    turns = [{"role": "tool", "tool_call_id": name, "content": name} for name in "fg"]
    turns.insert(0, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]})
    rendered = adapted("{{ m.content }}", turns, [], PARSERS["hermes"])
    assert rendered[1:] == [
        {
            "role": "user",
            "content": "<tool_response>\nf\n</tool_response>\n<tool_response>\ng\n</tool_response>",
        }
    ]
    assert adapted("{{ tools }}{{ m.tool_calls }}", turns, [], PARSERS["hermes"]) == turns


@pytest.mark.parametrize(("content", "shown"), [("", ""), ("I look.", "[I look.]")])
def test_a_template_that_renders_content_or_calls_gets_them_apart(content: str, shown: str) -> None:
    turn = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    turns = adapted(DISTILL, [turn], [], PARSERS["deepseek_v3"])
    assert render(DISTILL, turns) == f"{shown}<｜tool▁call▁begin｜>now"


def test_a_turn_with_reasoning_content_and_calls_keeps_both_in_one_text() -> None:
    turn = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALL]}
    assert render(HARMONY, adapted(HARMONY, [turn], [], PARSERS["harmony"])).endswith(
        "<|message|>Hm.\n\nI look."
    )
    for changes in ({"content": ""}, {"reasoning_content": None}, {"tool_calls": []}):
        assert adapted(HARMONY, [turn | changes], [], None) == [turn | changes]
    assert adapted("{{ tools }}", [turn], [], None) == [turn]


@pytest.mark.parametrize(
    ("template", "given", "expected"),
    [
        ("{{ thinking }}", {"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ("{{ enable_thinking }}", {"thinking": True}, {"enable_thinking": True, "thinking": True}),
        ("{{ enable_thinking }}", {"enable_thinking": True}, {"enable_thinking": True}),
        (
            "{{ thinking }}",
            {"enable_thinking": False, "thinking": True},
            {"enable_thinking": False, "thinking": True},
        ),
        ("{{ reasoning }}", {"enable_thinking": False}, {"enable_thinking": False, "reasoning": False}),
        ("{{ thinking }}", {"enable_thinking": "no"}, {"enable_thinking": "no"}),
        ("{{ thinking }}", {"other": True}, {"other": True}),
        ("{{ m.rethinking }}", {"enable_thinking": True}, {"enable_thinking": True}),
    ],
)
def test_the_switch_of_reasoning_has_the_name_that_the_template_reads(
    template: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert with_switch(template, given) == expected
