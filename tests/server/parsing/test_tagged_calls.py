"""Calls in tags: types of values, and grammars of forced calls.

Covers server/parsing/tagged_call.py, server/parsing/tagged_grammar.py, server/parsing/argument_types.py,
server/parsing/formats/qwen_coder.py, server/parsing/formats/seed_oss.py, server/parsing/formats/glm.py,
server/parsing/formats/minimax_m2.py and server/parsing/formats/deepseek_v32.py.
"""

import json
from typing import Any

import pytest

from engine.request import Grammar
from server.parsing.argument_types import types_of
from server.parsing.parser import Tools
from server.parsing.tool_call_grammar import NoGrammar, forced_call_grammar
from server.schema.tools import FunctionDefinition
from tests.server.parsing.test_tool_call_grammar import Writer, rules_of
from tests.server.parsing.texts import make, parse

DEFINITIONS = {
    "Unit": {"enum": ["C", "F"]},
    "Place": {"type": "object", "properties": {"at": {"$ref": "#/$defs/Place"}}},
    "Loop": {"$ref": "#/$defs/Loop"},
    "a/b": {"type": "boolean"},
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, {"array", "null"}),
        ({"oneOf": [{"const": 1}, {"const": 1.5}, {"const": True}]}, {"integer", "number", "boolean"}),
        ({"$ref": "#/$defs/Unit"}, {"string"}),
        ({"allOf": [{"$ref": "#/$defs/Place"}], "default": None}, {"object"}),
        ({"enum": ["a", None, [], {}]}, {"string", "null", "array", "object"}),
        ({"$ref": "#/$defs/a~1b"}, {"boolean"}),
        ({"$ref": "#/$defs/Loop"}, set()),
        ({"$ref": "#/$defs/None"}, set()),
        ({"$ref": "https://example.com"}, set()),
        ({"type": 5, "anyOf": 3, "enum": None}, set()),
        ({}, set()),
        (True, set()),
        (None, set()),
    ],
)
def test_types_are_found_wherever_a_schema_names_them(schema: Any, types: set[str]) -> None:
    assert types_of(schema, {"$defs": DEFINITIONS}) == types


def test_alternatives_without_end_have_no_types() -> None:
    schema: dict[str, Any] = {}
    schema["anyOf"] = [schema] * 2
    assert types_of(schema, schema) == frozenset()


VALUES = [
    ({"type": "string"}, "2", "2"),
    ({"type": "integer"}, "2", 2),
    ({"type": "integer"}, "two", "two"),
    ({"type": "number"}, "1e3", 1000.0),
    ({"type": "boolean"}, "True", True),
    ({"type": "object"}, '{"a": [1, 2', {"a": [1, 2]}),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "2", "2"),
    ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "null", None),
    ({"$ref": "#/$defs/Place"}, "{}", {}),
    ({"$ref": "#/$defs/Unit"}, '"C"', '"C"'),
    ({}, "[1]", "[1]"),
    ({"type": "string"}, "<tool_call> & </arg_key>", "<tool_call> & </arg_key>"),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
        ("qwen3_coder", "<tool_call><function=f>\n<parameter=a>\n{}\n</parameter></function></tool_call>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="a">{}</parameter></invoke>'),
        ("seed_oss", "<seed:tool_call>\n<function=f><parameter=a>{}</parameter></function></seed:tool_call>"),
    ],
)
def test_a_schema_says_how_a_value_is_read(name: str, call: str, schema: Any, text: str, value: Any) -> None:
    tools = Tools({"f": {"properties": {"a": schema}, "$defs": DEFINITIONS}})
    [found] = parse(make(name, tools), *call.replace("{}", text)).calls
    assert json.loads(found.arguments) == {"a": value}


@pytest.mark.parametrize(("is_string", "value"), [("true", "[1]"), ("false", [1])])
def test_an_attribute_says_how_a_value_is_read(is_string: str, value: Any) -> None:
    value_text = '<｜DSML｜parameter name="a" string="{}">[1]</｜DSML｜parameter>'
    text = f'<｜DSML｜invoke name="f">{value_text}</｜DSML｜invoke>'
    [found] = parse(make("deepseek_v32"), *text.replace("{}", is_string)).calls
    assert json.loads(found.arguments) == {"a": value}


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder", "minimax_m2", "seed_oss", "deepseek_v32"])
def test_hostile_tags_are_read_in_linear_time(name: str) -> None:
    parser = make(name)
    [(opener, closer), *_] = type(parser).blocks.items()  # type: ignore[attr-defined]
    tags = type(parser).tags  # type: ignore[attr-defined]
    head = f"{opener}{tags.function}now{tags.after_name}\n"
    argument = f"{tags.parameter}a{tags.after_key}{tags.value}"
    for text in (
        opener * 30_000,
        head * 8000,
        head + argument * 8000,
        head + argument + "<" * 60_000,
        head + tags.parameter + "k" * 60_000,
        head + tags.parameter + "k " + '"' * 60_000,
        head + closer * 30_000,
        head + argument + tags.end_value[:-1] * 15_000,
    ):
        for call in parse(make(name), *(text[at : at + 50] for at in range(0, len(text), 50))).calls:
            assert isinstance(json.loads(call.arguments), dict)


GLM_TOKENS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "any"},
        "unit": {"$ref": "#/$defs/Unit"},
        "place": {"$ref": "#/$defs/Place"},
        "days": {"type": "integer", "maximum": 9},
    },
    "required": ["text"],
    "$defs": DEFINITIONS,
}


def grammar_of(name: str, parameters: Any, markers: tuple[str, ...] = ()) -> tuple[Writer, Grammar]:
    writer = Writer(markers)
    tool = FunctionDefinition(name="f", parameters=parameters)
    return writer, forced_call_grammar(rules_of(name, writer.tokens), [tool], is_one=False)


@pytest.mark.parametrize("markers", [(), GLM_TOKENS])
def test_text_is_free_up_to_its_tag(markers: tuple[str, ...]) -> None:
    writer, grammar = grammar_of("glm45", PARAMETERS, markers)

    def call(*arguments: tuple[str, str]) -> str:
        pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments]
        return f"<tool_call>f\n{''.join(pairs)}</tool_call>"

    text = ("text", 'a\n"b" < {c')
    assert writer.is_allowed(grammar, call(text))
    assert writer.is_allowed(grammar, call(text, ("unit", "F"), ("place", '{"at": {}}'), ("days", "9")))
    assert writer.is_allowed(grammar, f"{call(text)}\n{call(text, ('days', '1'))}")
    for wrong in (
        call(),
        call(("days", "1")),
        call(text, ("unit", "K")),
        call(text, ("days", "10")),
        call(text, ("days", '"1"')),
        call(text, ("place", "[]")),
        call(text, ("other", "1")),
        call(text).replace("f\n", "g\n"),
    ):
        assert not writer.is_allowed(grammar, wrong), wrong


def test_calls_of_one_block_are_between_one_pair_of_markers() -> None:
    writer, grammar = grammar_of("minimax_m2", PARAMETERS)
    call = '<invoke name="f">\n<parameter name="text">a</parameter>\n</invoke>'
    assert writer.is_allowed(grammar, f"<minimax:tool_call>\n{call}\n</minimax:tool_call>")
    assert writer.is_allowed(grammar, f"<minimax:tool_call>\n{call}\n{call}\n</minimax:tool_call>")
    assert not writer.is_allowed(grammar, call)


def test_newlines_separate_values_from_their_tags_where_the_format_says_so() -> None:
    writer, grammar = grammar_of("qwen3_coder", PARAMETERS)
    call = (
        "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n<parameter=days>\n1\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    assert writer.is_allowed(grammar, call)
    assert not writer.is_allowed(grammar, call.replace("\n1\n", "1"))


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object"},
        {"properties": {}, "additionalProperties": True},
        {"properties": {"a": {"type": "string", "pattern": "x"}}},
        {"properties": {"a": {"type": ["string", "integer"]}}},
        {"properties": {"a": {}}},
        {"properties": {"a": {"enum": ["x", 1]}}},
        {"properties": {"a": {"enum": ["x</parameter>"]}}},
        {"properties": {"a": {"enum": ["\nx"]}}},
        {"properties": {"a>": {"type": "integer"}}},
        {"properties": {"a": {"type": "integer"}}, "required": ["b"]},
        {"properties": {"a": {"type": "integer"}}, "anyOf": [{"required": ["a"]}]},
    ],
)
def test_what_text_cannot_be_made_to_follow_has_no_grammar_in_tags(parameters: Any) -> None:
    with pytest.raises(NoGrammar):
        grammar_of("qwen3_coder", parameters)
