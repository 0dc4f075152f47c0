"""Values as models write them, as JSON."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.control_tokens import MARK
from server.parsing.json_repair import MAX_DEPTH, JsonRepair


def write(*pieces: str, ends: str = "") -> str:
    """The JSON of text that comes in pieces."""
    writer = JsonRepair(ends)
    return "".join(writer.feed(piece)[0] for piece in pieces) + writer.close()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@settings(max_examples=200)
@given(values, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_strict_json_passes_unchanged(value: Any, indent: int | str | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    if MARK not in text:
        assert write(text) == text
        assert write(*text) == text


@settings(max_examples=100)
@given(
    st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.text()))
)
def test_python_literals_mean_the_same(value: dict[str, Any]) -> None:
    text = repr(value)
    escapes = ("\\U", MARK)
    if not any(escape in text for escape in escapes):
        assert json.loads(write(text)) == json.loads(json.dumps(value))


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from([*"{}[]()\"',:=\\ \n1e.-xu", "True", "null", "\\u00", MARK, "é"]), max_size=30)
)
def test_any_text_makes_valid_json_however_it_is_cut(words: list[str]) -> None:
    text = "".join(words)
    whole = write(text)
    json.loads(whole)
    assert write(*text) == whole


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1, "b": 2,}', {"a": 1, "b": 2}),
        ('{"a": [1, 2}', {"a": [1, 2]}),
        ('{"a": "x" "b": "y"}', {"a": "x", "b": "y"}),
        ('{a: 1, b = hello world, "c": }', {"a": 1, "b": "hello world", "c": None}),
        ('{"a": "line\nbreak\ttab"}', {"a": "line\nbreak\ttab"}),
        (r'{"re": "\d+\.\w", "u": "\u12", "q": "\'"}', {"re": r"\d+\.\w", "u": r"\u12", "q": "'"}),
        (r"['it\'s', 'say \"hi\"', '\x41']", ["it's", 'say "hi"', "A"]),
        ("{'n': NaN, 'i': +1, 'z': 007, 'f': 1e5, 't': True, 'o': None}",
         {"n": "NaN", "i": "+1", "z": "007", "f": 1e5, "t": True, "o": None}),
        ('{"a": "never ends', {"a": "never ends"}),
        ('{"a": {"b"', {"a": {"b": None}}),
        ("[1,, ,2", [1, 2]),
        ("", None),
    ],
)  # fmt: skip
def test_what_goes_wrong_most_often_is_read_all_the_same(text: str, value: Any) -> None:
    assert json.loads(write(text)) == value


@pytest.mark.parametrize(
    ("text", "ends", "value", "rest"),
    [
        ("1, 2", "", 1, ", 2"),
        ('{"a": 1} {"b": 2}', "", {"a": 1}, ' {"b": 2}'),
        ("[1, 2)", "", [1, 2], ""),
        ('{"a": 1) + 2', "", {"a": 1}, ") + 2"),
        ('{"a": "<b>", "c": 1</x>', "<", {"a": "<b>", "c": 1}, "</x>"),
        (f'{{"a": "cut{MARK}</x>', "", {"a": "cut"}, f"{MARK}</x>"),
    ],
)
def test_a_value_ends_where_it_is_complete(text: str, ends: str, value: Any, rest: str) -> None:
    writer = JsonRepair(ends)
    out, at = writer.feed(text)
    assert writer.is_done
    assert (json.loads(out), text[at:]) == (value, rest)


def test_depth_is_bounded() -> None:
    assert json.loads(write("[" * 5000)) is not None
    assert write("[" * MAX_DEPTH + "]" * MAX_DEPTH) == "[" * MAX_DEPTH + "]" * MAX_DEPTH


def test_values_come_as_they_are_written() -> None:
    writer = JsonRepair()
    assert writer.feed('{"a": "on')[0] == '{"a": "on'
    assert writer.feed("e\\")[0] == "e"
    assert writer.feed('n", "b": 1')[0] == '\\n", "b": '
    assert writer.feed("2}")[0] == "12}"
