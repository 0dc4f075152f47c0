"""Parsers of single formats: ids, names, control tokens, ends.

Covers server/parsing/json_call.py.
"""

import json
import re

import pytest

from engine.control_tokens import MARK
from server.parsing.events import Arguments, CallEnd, CallStart, Content
from server.parsing.formats import tool_formats
from server.parsing.parser import Marker, Tools
from tests.server.parsing.texts import TOOLS, make, parse

BEFORE_BLANKS = [
    ("hermes", "a"),
    ("hermes", "<tool_call>"),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b", '),
    ("llama3_json", ""),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS]now"),
    ("pythonic", "[now(a"),
    ("pythonic", "[now(a=[1"),
    ("qwen3_coder", "<tool_call><function=now>"),
    ("qwen3_coder", "<tool_call><function=now><parameter=a>"),
]


@pytest.mark.parametrize(("name", "text"), BEFORE_BLANKS)
def test_blanks_in_many_pieces_are_read_in_linear_time(name: str, text: str) -> None:
    parser = make(name)
    parser.feed(text)
    for _ in range(20_000):  # what copies what it holds for each of them takes a minute
        parser.feed(" " * 200)
    parser.finish(is_cut=True)


def test_arguments_come_as_they_are_written() -> None:
    parser = make("hermes")
    assert parser.feed('Hi <tool_call>{"name": "now", "argum') == [Content("Hi")]
    [begun, first] = parser.feed('ents": {"a"')
    assert isinstance(begun, CallStart)
    assert (begun.number, begun.name, first) == (0, "now", Arguments(0, '{"a"'))
    assert re.fullmatch(r"call_[0-9a-f]{24}", begun.id)
    assert parser.feed(': "x') == [Arguments(0, ': "x')]
    assert parser.feed('"}') == [Arguments(0, '"}')]
    assert parser.feed("}") == [CallEnd(0)]
    assert parser.feed("\n</tool_ca") == []
    assert parser.feed("ll>\n") == []
    assert parser.finish() == []


def test_mistral_ids_have_nine_letters_or_digits() -> None:
    text = "[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}[TOOL_CALLS]now[CALL_ID]short[ARGS]{}"
    ids = [call.id for call in parse(make("mistral"), text).calls]
    assert ids[0] == "a1B2c3D4e"
    assert re.fullmatch(r"[A-Za-z0-9]{9}", ids[1])
    assert ids[1] != "short"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>'),
        ("mistral", "[TOOL_CALLS]now[ARGS]{}"),
        ("granite", '<|tool_call|>[{"name": "now"}]'),
        ("deepseek_v3", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        ("glm45", "<tool_call>now\n</tool_call>"),
        ("llama3_json", 'So: <|python_tag|>{"name": "now", "parameters": {}}'),
        ("pythonic", "So: <|python_start|>[now()]<|python_end|>"),
        ("qwen3_coder", "<tool_call></tool_call>"),
    ],
)
def test_text_that_spells_a_control_token_is_content(name: str, text: str) -> None:
    markers = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>"]
    markers += tool_formats()[name].markers
    marker = Marker(dict.fromkeys(markers, 1))
    assert parse(make(name, marker=marker), *text).content == text
    assert parse(make(name, marker=marker), *text).calls == []


def test_a_control_token_ends_a_string_that_never_ends() -> None:
    marker = Marker({"<tool_call>": 1, "</tool_call>": 2})
    text = f'{MARK}<tool_call>{{"name": "now", "arguments": {{"a": "x</tool_call>{MARK}</tool_call>Done.'
    message = parse(make("hermes", marker=marker), *text)
    assert [json.loads(call.arguments) for call in message.calls] == [{"a": "x</tool_call>"}]
    assert message.content == "Done."


def test_an_id_that_the_model_repeats_is_replaced() -> None:
    text = '[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}'
    first, second = parse(make("mistral"), text).calls
    assert first.id == "a1B2c3D4e" != second.id and re.fullmatch(r"[A-Za-z0-9]{9}", second.id)


@pytest.mark.parametrize(
    ("first", "second", "is_repeated"),
    [
        ('{"a": 1, "b": [true]}', '{"b":[true],"a":1}', True),
        ('{"a": "\\u00e9"}', '{"a": "é"}', True),
        ("{}", "{}", True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": [1, 2]}', '{"a": [2, 1]}', False),
        (f'{{"a": {"9" * 5000}}}', f'{{"a": {"9" * 5000}}}', True),
    ],
)
def test_nothing_follows_a_call_with_the_name_and_the_values_of_another(
    first: str, second: str, is_repeated: bool
) -> None:
    calls = [f'<tool_call>{{"name": "now", "arguments": {text}}}</tool_call>' for text in (first, second)]
    message = parse(make("hermes"), *calls, "Done.")
    assert [call.is_complete for call in message.calls] == [True, True]
    assert message.content == ("" if is_repeated else "Done.")
    other = calls[1].replace("now", "get_weather")
    assert parse(make("hermes"), calls[0], other, "Done.").content == "Done."


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_without_a_marker_only_tools_of_the_request_are_called(name: str) -> None:
    text = '{"name": "rm", "parameters": {}}' if name == "llama3_json" else "[rm()]"
    message = parse(make(name), *text)
    assert (message.content, message.calls) == (text, [])


def test_a_tool_outside_the_request_can_be_called_after_a_marker() -> None:
    [call] = parse(make("hermes"), '<tool_call>{"name": "rm"}</tool_call>').calls
    assert (call.name, call.arguments) == ("rm", "{}")


def test_tools_that_are_not_allowed_are_not_called() -> None:
    tools = Tools(TOOLS.parameters, only=frozenset({"now"}))
    text = '<tool_call>{"name": "get_weather"}</tool_call><tool_call>{"name": "now"}</tool_call>'
    message = parse(make("hermes", tools), *text)
    assert [call.name for call in message.calls] == ["now"]
    assert message.content == '<tool_call>{"name": "get_weather"}</tool_call>'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>[{"name": "now"}, {"name": "now"}]</tool_call> more'),
        ("mistral", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}more"),
        ("pythonic", "[now(), now()] more"),
        ("qwen3_coder", "<function=now></function><function=now></function>more"),
    ],
)
def test_without_parallel_calls_nothing_follows_the_first(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        parser = make(name, Tools(TOOLS.parameters, parallel=False))
        message = parse(parser, *pieces)
        assert (len(message.calls), message.content) == (1, "")
        assert parser.is_full


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name'),
        ("llama3_json", '{"name": "now", "parameters": {"a": 1}}; {"name": '),
        ("cohere", '<|START_ACTION|>[{"tool_name": "now", "parameters": {"a": 1}}, {"tool_n'),
        (
            "deepseek_v3",
            '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>n',
        ),
        (
            "glm45",
            "<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n<tool_call>n",
        ),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {"a": 1}}, {"name"'),
        ("mistral", '[TOOL_CALLS]now[ARGS]{"a": 1}[TOOL_CALLS]now[AR'),
    ],
)
def test_a_forced_call_that_broke_off_leaves_no_content(name: str, text: str) -> None:
    for length in range(len(text) + 1):
        parser = make(name, Tools(TOOLS.parameters, is_constrained=True))
        message = parse(parser, *text[:length], is_cut=True)
        assert message.content == "", text[:length]
        assert message.calls or length < text.index("1")


def test_a_call_that_broke_off_stays_incomplete() -> None:
    parser = make("hermes")
    [call] = parse(parser, '<tool_call>{"name": "now", "arguments": {"a": "x', is_cut=True).calls
    assert (call.arguments, call.is_complete, parser.is_call_open) == ('{"a": "x', False, True)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 4000,
        '<tool_call>{"arguments": ' * 3000,
        "[" * 40_000 + "}" * 40_000,
        '<tool_call>{"name": "now", "arguments": {"a": ' + '"\\' * 30_000,
        "<|python_start|>[now(" + "a=(" * 20_000,
        " " * 60_000 + "<tool_call" * 3000,
        "[TOOL_CALLS]" + "x" * 60_000,
        "<function=now>" + "<parameter=a>\n" * 4000,
    ],
)
def test_long_nonsense_is_read_to_its_end(text: str) -> None:
    for name in tool_formats():
        pieces = [text[start : start + 7] for start in range(0, len(text), 7)]
        for call in parse(make(name), *pieces).calls:
            json.loads(call.arguments)


@pytest.mark.parametrize("name", tool_formats())
def test_markers_in_any_number_are_read_in_linear_time(name: str) -> None:
    """What reads its text again for each of them takes minutes."""
    for marker in tool_formats()[name].markers:
        for text in (marker, f"{marker}\n", f"{marker}now", f'{marker}{{"name": "now"'):
            text *= 2000
            parse(make(name), *(text[start : start + 7] for start in range(0, len(text), 7)))


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_k2"])
def test_a_header_that_does_not_end_is_content(name: str) -> None:
    parser = make(name)
    opener = parser.call[0]  # type: ignore[attr-defined]
    for text in (opener + "x" * 600, f"{opener} {{", opener + "a b c d{}"):
        message = parse(make(name), *text)
        assert (message.content, message.calls) == (text, [])


def test_the_ids_of_kimi_name_the_function() -> None:
    text = (
        "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"days": 1}<|tool_call_end|>'
    )
    assert [call.id for call in parse(make("kimi_k2"), *text).calls] == [
        "functions.now:0",
        "functions.get_weather:1",
    ]


@pytest.mark.parametrize("piece", ["<", "</tool", "\n</tool_call"])
def test_a_piece_of_the_marker_behind_a_call_is_no_content(piece: str) -> None:
    """The limit of tokens strikes anywhere; an answer that ends by itself has said what it has."""
    text = '<tool_call>\n{"name": "now", "arguments": {}}' + piece
    for is_cut, content in ((True, ""), (False, piece.strip())):
        message = parse(make("hermes"), text, is_cut=is_cut)
        assert (message.content.strip(), len(message.calls)) == (content, 1)


def test_a_piece_of_a_marker_beside_json_is_no_content() -> None:
    assert parse(make("hermes", Tools({}, is_constrained=True)), "<tool", is_cut=True).content == ""
