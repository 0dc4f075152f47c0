"""The events of a parser add up to the same message however the text is cut.

Covers server/parsing/marked_json.py, server/parsing/named_call.py, server/parsing/json_arguments.py,
server/parsing/formats/hermes.py,
server/parsing/formats/llama.py, server/parsing/formats/mistral.py, server/parsing/formats/pythonic.py,
server/parsing/formats/cohere.py, server/parsing/formats/deepseek.py, server/parsing/formats/granite.py,
server/parsing/quoted_json.py, server/parsing/formats/function_gemma.py, server/parsing/formats/gemma4.py,
server/parsing/formats/internlm.py, server/parsing/formats/kimi.py, server/parsing/formats/minimax.py,
server/parsing/formats/minimax_m3.py, server/parsing/formats/functionary.py,
server/parsing/formats/nemotron.py and server/parsing/formats/phi4_mini.py.
"""

import json
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.control_tokens import MARK
from server.parsing.formats import tool_formats
from server.parsing.parser import Marker
from tests.server.parsing.texts import TEXTS, Text, make, parse, summary


def cuts(text: str) -> Iterator[list[str]]:
    """Yield the text by the character, and cut in two at every place."""
    yield list(text)
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]


def marked(name: str, text: str) -> tuple[str, Marker]:
    """Return the text with its markers as control tokens."""
    markers = tool_formats()[name].markers
    for number, marker in enumerate(markers):
        text = text.replace(marker, f"\0{number}\0")
    for number, marker in enumerate(markers):
        text = text.replace(f"\0{number}\0", MARK + marker)
    return text, Marker(dict.fromkeys(markers, 1))


@pytest.mark.parametrize("case", TEXTS, ids=[f"{text.format}-{i}" for i, text in enumerate(TEXTS)])
def test_a_text_says_what_it_says(case: Text) -> None:
    message = parse(make(case.format), case.text)
    assert message.content == case.content
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == case.calls
    assert all(call.is_complete for call in message.calls)


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("case", TEXTS, ids=[f"{text.format}-{i}" for i, text in enumerate(TEXTS)])
def test_every_cut_of_every_beginning_joins_to_the_same(case: Text, has_tokens: bool, is_cut: bool) -> None:
    text, marker = marked(case.format, case.text) if has_tokens else (case.text, Marker())
    for length in (*range(1, len(text), 3), len(text)):
        beginning = text[:length]
        whole = summary(parse(make(case.format, marker=marker), beginning, is_cut=is_cut))
        for pieces in (list(beginning), [beginning[: length // 2], beginning[length // 2 :]]):
            got = summary(parse(make(case.format, marker=marker), *pieces, is_cut=is_cut))
            assert got == whole, f"{beginning!r} in pieces {pieces!r}"
        for name, arguments, is_complete in whole[2]:
            if is_complete:
                assert isinstance(json.loads(arguments), dict), f"{name}{arguments} of {beginning!r}"
    for pieces in cuts(text):
        got = summary(parse(make(case.format, marker=marker), *pieces, is_cut=is_cut))
        assert got == whole, f"in pieces {pieces!r}"


WORDS: dict[str, list[str]] = {
    "harmony": [
        "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "assistant",
        " to=now", "analysis", "commentary to=functions.now", "final",
        '<|channel|>final to=now<|message|>{"a": ',
    ],
    "hermes": [
        "<tool_call>", "</tool_call>", '{"name": "now", "arguments": ', '{"arguments": {"a": "<"}, "name": ',
    ],
    "llama3_json": [
        "<|python_tag|>", '{"name": "now", "parameters": ', '{"name": "now", "parameters": {"a": ', ";",
    ],
    "mistral": [
        "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "now", '[TOOL_CALLS]now[ARGS]{"a": ', "[TOOL_CALLS][",
        '{"name": "now", "arguments": ',
    ],
    "pythonic": ["<|python_start|>", "<|python_end|>", "[now(", "now(", "a=", ")", "(", "'"],
    "glm45": [
        "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
        "<tool_call>now", "get_weather\n", "<arg_key>days</arg_key><arg_value>", "<arg_key>unit</arg_key>",
    ],
    "granite": ["<|tool_call|>", "<function_call>", '{"name": "now", "arguments": ', '{"name": "now"}'],
    "phi4_mini": ["<|tool_call|>", "<|/tool_call|>", "functools", '{"name": "now", "arguments": {"a": '],
    "cohere": [
        "<|START_ACTION|>", "<|END_ACTION|>", "Action: ", "```", "json",
        '{"tool_call_id": "0", "tool_name": "now"', '{"tool_name": "now", "parameters": ',
    ],
    "minimax": ["<tool_calls>", "</tool_calls>", '{"name": "now", "arguments": ', '{"name": "now"}'],
    "internlm": ["<|action_start|>", "<|plugin|>", "<|action_end|>", '{"name": "now", "parameters": '],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>", "now", "function", "```", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>",
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_end|>", "<|tool_call_argument_begin|>", "functions.now:0", "now:",
        "<|tool_call_begin|>now:1",
    ],
    "function_gemma": [
        "<start_function_call>", "<end_function_call>", "<escape>", "call:now{", "call:", "a:", "{a:<escape>",
        "<start_function_response>",
    ],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>', "call:now{", "a:", '{a:<|"|>', "<|tool_response>"],
    "minimax_m2": [
        "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="now">', "</invoke>",
        '<parameter name="', "</parameter>", '<invoke name="get_weather">',
        '<parameter name="days">', 'unit">', ">",
    ],
    "minimax_m3": [
        "]<]minimax[>[", "]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>",
        ']<]minimax[>[<invoke name="now">', "]<]minimax[>[</invoke>", "]<]minimax[>[<a>", "]<]minimax[>[</a>",
        "]<]minimax[>[<item>", "]<]minimax[>[</item>", ']<]minimax[>[<invoke name="get_weather">',
        "]<]minimax[>[<places>", "]<]minimax[>[</places>", "]<]minimax[>[<days>", "</days>", "]<]min",
    ],
    "functionary_v31": ["<function=", "</function>", "<function=now>", "now>", "<function=now>{"],
    "nemotron": ["<TOOLCALL>", "</TOOLCALL>", '{"name": "now", "arguments": ', '{"name": "now"}'],
    "deepseek_v32": [
        "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", '<｜DSML｜invoke name="now">',
        "</｜DSML｜invoke>",
        '<｜DSML｜parameter name="a" string="true">', '<｜DSML｜parameter name="a" string="false">',
        "</｜DSML｜parameter>", "</｜DSML｜tool_calls>", "｜DSML｜", "</",
    ],
    "seed_oss": [
        "<seed:tool_call>", "</seed:tool_call>", "<function=now>", "</function>", "<parameter=a>",
        "</parameter>", "<function=get_weather>", "<parameter=days>", "<parameter=places>",
    ],
    "qwen3_coder": [
        "<tool_call>", "</tool_call>", "<function=now>", "</function>", "<parameter=a>", "</parameter>",
        "<function=get_weather>", "<parameter=days>", "<parameter=unit>", "<parameter=city>",
    ],
}  # fmt: skip
COMMON = [
    "{",
    "}",
    "[",
    "]",
    '"',
    ",",
    ":",
    "\\",
    "\\u12",
    "\n",
    " ",
    "x",
    "é",
    "1",
    "-",
    "True",
    "null",
    MARK,
]


@st.composite
def texts(draw: st.DrawFn) -> tuple[str, str, list[int], bool, bool]:
    """A format, a text of its words in any order, places to cut it, whether it breaks off, control tokens."""
    name = draw(st.sampled_from(sorted(WORDS)))
    words = st.sampled_from(WORDS[name] + COMMON) | st.text(max_size=3)
    text = "".join(draw(st.lists(words, min_size=1, max_size=20)))
    places = draw(st.lists(st.integers(0, len(text)), max_size=8))
    return name, text, sorted(places), draw(st.booleans()), draw(st.booleans())


@settings(max_examples=1500)
@given(texts())
def test_any_text_however_it_is_cut(drawn: tuple[str, str, list[int], bool, bool]) -> None:
    name, text, places, is_cut, has_tokens = drawn
    text, marker = marked(name, text) if has_tokens and "\0" not in text else (text, Marker())
    places = [0, *places, len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]
    whole = parse(make(name, marker=marker), text, is_cut=is_cut)
    assert summary(parse(make(name, marker=marker), *pieces, is_cut=is_cut)) == summary(whole)
    assert summary(parse(make(name, marker=marker), *text, is_cut=is_cut)) == summary(whole)
    for call in whole.calls:
        if call.is_complete:
            assert isinstance(json.loads(call.arguments), dict), f"{call} of {text!r}"
    assert all(call.is_complete for call in whole.calls[:-1]), "only the last call may be cut"
    assert is_cut or all(call.is_complete for call in whole.calls)
    assert MARK not in whole.content


def test_every_format_is_tried() -> None:
    assert set(WORDS) == set(tool_formats()) == {text.format for text in TEXTS}
