"""The tokenizer's own response template, through transformers' parser."""

import copy
from typing import Any

import pytest
from transformers.utils.chat_parsing import ResponseParser

from server.parsing.formats.response_template import RegionParser, ResponseTemplateParser
from server.parsing.parser import Tools
from tests.server.parsing.texts import TOOLS, parse, summary

TEMPLATE: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<call:(?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}
LIST_TEMPLATE = copy.deepcopy(TEMPLATE)
LIST_TEMPLATE["fields"]["tool_calls"] = {
    "open": "<calls>",
    "close": "</calls>",
    "content": "json",
    "transform_each": True,
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
}


def make(
    prompt: str = "<|im_start|>assistant\n", tools: Tools = TOOLS, template: dict[str, Any] = TEMPLATE
) -> ResponseTemplateParser:
    def regions() -> RegionParser:
        parser: RegionParser = ResponseParser(template, prefix=prompt)
        return parser

    return ResponseTemplateParser(tools, regions)


NOW = '<call:now>{"a": 1}</call>'


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("Hello there.<|im_end|>", "", "Hello there.", []),
        ("<think>\nHm, yes.\n</think>\n\nYes. ", "Hm, yes.", "Yes.", []),
        (
            f"<think>Hm.</think>One moment.\n\n{NOW}\n<call:get_weather>{{}}</call><|im_end|>",
            "Hm.",
            "One moment.",
            [("now", '{"a": 1}', True), ("get_weather", "{}", True)],
        ),
        (f"{NOW}<call:now>{{oops</call> and {NOW}", "", f"{{oops and {NOW}", [("now", '{"a": 1}', True)]),
        ("<call:now>[1]</call>no", "", "[1]no", []),
    ],
)
def test_regions_become_events(text: str, reasoning: str, content: str, calls: list[Any]) -> None:
    whole = summary(parse(make(), text))
    assert (whole[1], whole[0].strip(), whole[2]) == (reasoning, content, calls)
    assert summary(parse(make(), *text)) == whole
    for place in range(1, len(text)):
        assert summary(parse(make(), text[:place], text[place:])) == whole, f"cut at {place}"


def test_the_prompt_may_have_opened_the_reasoning() -> None:
    message = parse(make("<|im_start|>assistant\n<think>\n"), "Hm.", "</think>", "4")
    assert (message.reasoning, message.content) == ("Hm.", "4")


def test_a_region_may_hold_a_list_of_calls() -> None:
    text = '<calls>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {"é": 2}}]</calls>'
    message = parse(make(template=LIST_TEMPLATE), text)
    assert [call.arguments for call in message.calls] == ["{}", '{"é": 2}']
    one = parse(make(template=LIST_TEMPLATE, tools=Tools(TOOLS.parameters, parallel=False)), text, "more")
    assert (len(one.calls), one.content) == (1, "")


def test_a_call_that_broke_off_is_content() -> None:
    message = parse(make(), 'So: <call:now>{"a": 1', is_cut=True)
    assert (message.content, message.calls) == ('So:{"a": 1', [])
