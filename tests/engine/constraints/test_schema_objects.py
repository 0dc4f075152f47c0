"""Objects that list properties have no others, unless their schema says so."""

import json
from typing import Any

import pytest

from engine.constraints.grammar import GrammarCompiler, compile_grammar
from engine.constraints.schema_objects import MAX_NAMES, close_objects
from engine.constraints.schema_rewrite import ready
from engine.request import Grammar
from tests.engine.tiny_engine import EOS, tiny_tokenizer, tiny_vocabulary

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
TEXT = {"type": "string"}


def takes(schema: dict[str, Any], value: Any, **options: Any) -> bool:
    """Return True if the grammar of a schema allows a value."""
    grammar = Grammar("json_schema", json.dumps(schema), whitespace="", **options)
    matcher = compile_grammar(grammar, tiny_vocabulary()).new_matcher()
    text = json.dumps(value, separators=(",", ":"))
    ids = tiny_tokenizer().encode(text, add_special_tokens=False).ids
    return bool(matcher.consume_tokens([*ids, EOS]))


@pytest.mark.parametrize(
    ("schema", "value", "more"),
    [
        (A, {"a": 1}, {"b": 2}),
        ({"properties": {}, "type": "object"}, {}, {"b": 2}),
        ({"$ref": "#/$defs/a", "$defs": {"a": A}}, {"a": 1}, {"b": 2}),
        ({"$ref": "#/$defs/a", "description": "x", "$defs": {"a": A}}, {"a": 1}, {"b": 2}),
        ({"allOf": [A], "title": "x"}, {"a": 1}, {"b": 2}),
        ({"anyOf": [A, {"type": "null"}]}, {"a": 1}, {"b": 2}),
        ({"oneOf": [A, {"type": "null"}]}, {"a": 1}, {"b": 2}),
        ({"allOf": [A, B]}, {"a": 1, "b": 2}, {"c": 3}),
        ({"allOf": [A, B], "unevaluatedProperties": False}, {"a": 1, "b": 2}, {"c": 3}),
        ({"allOf": [{"$ref": "#/$defs/a"}, B], "$defs": {"a": A}}, {"a": 1, "b": 2}, {"c": 3}),
        ({"allOf": [{"allOf": [A, B]}, {"properties": {"c": {}}}]}, {"a": 1, "b": 2, "c": 3}, {"d": 4}),
        ({**A, "anyOf": [B, {"properties": {"c": TEXT}}]}, {"a": 1, "b": 2}, {"d": 4}),
        ({**A, "anyOf": [{"required": ["a"]}]}, {"a": 1}, {"b": 2}),
        ({**A, "patternProperties": {"^x": TEXT}}, {"a": 1, "x1": "y"}, {"b": 2}),
    ],
    ids=str,
)
def test_objects_have_only_the_properties_they_list(schema: Any, value: Any, more: Any) -> None:
    assert takes(schema, value)
    assert not takes(schema, value | more)
    assert not takes({"properties": {"x": schema}, "$defs": schema.get("$defs", {})}, {"x": value | more})
    if "unevaluatedProperties" not in schema:
        assert takes(schema, value, closes_objects=False)
        assert takes(schema, value | more, closes_objects=False)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({**A, "additionalProperties": True}, {"a": 1, "b": 2}),
        ({**A, "additionalProperties": TEXT}, {"a": 1, "b": "x"}),
        ({**A, "unevaluatedProperties": True}, {"a": 1}),
        ({"allOf": [{**A, "additionalProperties": True}, B]}, {"a": 1, "b": 2, "c": 3}),
        ({"allOf": [A, B], "additionalProperties": True}, {"a": 1, "b": 2, "c": 3}),
        ({"type": "object"}, {"b": 2}),
        ({"type": "object", "required": ["b"]}, {"b": 2}),
        ({"type": "object", "patternProperties": {"^x": TEXT}}, {"b": 2}),
        ({"const": {"properties": {"a": {}}}}, {"properties": {"a": {}}}),
        ({"properties": {"properties": {"type": "object"}}}, {"properties": {"a": 1}}),
    ],
    ids=str,
)
def test_other_objects_stay_as_they_are(schema: Any, value: Any) -> None:
    assert takes(schema, value)


def test_definitions_that_are_parts_stay_open() -> None:
    schema = {
        "$defs": {
            "base": A,
            "sub": {"allOf": [{"$ref": "#/$defs/base"}, B]},
            "self": {"$ref": "#/$defs/self"},
        },
        "anyOf": [{"$ref": "#/$defs/sub"}, {"$ref": "#/$defs/self"}],
    }
    closed = ready(schema, closes_objects=True)["$defs"]
    assert "additionalProperties" not in closed["base"]
    assert closed["sub"]["properties"] == {"a": True, "b": True}
    assert closed["sub"]["additionalProperties"] is False


def test_the_number_of_names_is_bounded() -> None:
    names = {f"n{number}": True for number in range(200)}
    parts = [{"allOf": [{"$ref": "#/$defs/all"}, {"properties": {f"p{n}": True}}]} for n in range(1000)]
    root: dict[str, Any] = {"$defs": {"all": {"properties": names}}, "prefixItems": parts}
    close_objects(root)
    assert sum(len(part.get("properties", ())) for part in root["prefixItems"]) <= 2 * MAX_NAMES


def test_the_number_of_visited_parts_is_bounded() -> None:
    every: dict[str, Any] = {"allOf": [{"properties": {"a": {}}} for _ in range(3000)]}
    parts = [{"allOf": [{"$ref": "#/$defs/all"}, {"properties": {"b": {}}}]} for _ in range(1000)]
    root: dict[str, Any] = {"$defs": {"all": every}, "prefixItems": parts}
    close_objects(root)
    assert 10 < sum("additionalProperties" in part for part in root["prefixItems"]) < 200


@pytest.mark.parametrize(("is_open", "given"), [(False, None), (True, None), (True, True), (False, False)])
async def test_the_setting_decides_where_the_request_does_not(is_open: bool, given: bool | None) -> None:
    compiler = GrammarCompiler(tiny_vocabulary(), open_objects=is_open)
    try:
        compiled = await compiler.compile(
            Grammar("json_schema", json.dumps(A), whitespace="", closes_objects=given)
        )
    finally:
        compiler.close()
    ids = tiny_tokenizer().encode('{"a":1,"b":2}', add_special_tokens=False).ids
    closes = given if given is not None else not is_open
    assert compiled.new_matcher().consume_tokens(ids) is not closes
