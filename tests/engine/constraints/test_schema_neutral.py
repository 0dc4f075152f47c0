"""Keywords that restrict nothing, or can be said by others, are rewritten; all others stay."""

import json
from typing import Any

import jsonschema
import pytest

from engine.constraints.schema_neutral import expressible
from engine.constraints.schema_walk import inner_schemas, resolved
from tests.engine.constraints.test_schema_rewrite import written

CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}}}


@pytest.mark.parametrize(
    "extra",
    [
        {"uniqueItems": False},
        {"dependentRequired": {}},
        {"dependentSchemas": {}},
        {"not": False},
        {"not": {"not": {}}},
        {"minContains": 0},
        {"maxContains": 2},
        {"contains": {"type": "null"}, "minContains": 0},
        {"unevaluatedProperties": True},
        {"unevaluatedItems": {}},
        {"if": {"type": "null"}},
        {"if": {"type": "null"}, "then": True, "else": {"title": "x"}},
        {"then": False},
        {"propertyNames": True},
        {"propertyNames": {"type": "string", "description": "a name"}},
        {"propertyNames": {"format": "path"}},
    ],
    ids=str,
)
def test_keywords_that_restrict_nothing_are_dropped(extra: dict[str, Any]) -> None:
    schema = {"type": ["array", "object"], "title": "t"}
    assert expressible(schema | extra) == schema
    assert expressible({"properties": extra}) == {
        "properties": expressible({"properties": extra})["properties"]
    }
    assert expressible({"const": extra, "enum": [extra]}) == {"const": extra, "enum": [extra]}


@pytest.mark.parametrize(
    "kept",
    [
        {"uniqueItems": True},
        {"not": {"type": "string"}},
        {"contains": {"type": "null"}},
        {"contains": {}, "minContains": 0, "maxContains": 1},
        {"unevaluatedProperties": False, "allOf": [{"type": "object"}]},
        {"if": {"type": "null"}, "then": False},
        {"dependentRequired": {"a": ["b"]}},
        {"propertyNames": {"format": "email"}},
        {"propertyNames": {"pattern": "^a"}, "properties": {"a": {}}},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [CAT, CAT]},
        {"oneOf": [{"type": "null"}, {"type": "string"}], "anyOf": [{}]},
        {"not": {}},
    ],
    ids=str,
)
def test_keywords_that_restrict_are_kept(kept: dict[str, Any]) -> None:
    assert expressible(kept) == kept


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (
            {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}},
            {"properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "additionalProperties": False},
        ),
        (
            {
                "propertyNames": {"$ref": "#/$defs/n"},
                "properties": {"a": {}, "c": {}},
                "$defs": {"n": {"const": "a"}},
            },
            {
                "properties": {"a": {}, "c": False},
                "$defs": {"n": {"const": "a"}},
                "additionalProperties": False,
            },
        ),
        (
            {"propertyNames": {"type": "string", "pattern": "^k"}, "additionalProperties": {"type": "null"}},
            {"patternProperties": {"^k": {"type": "null"}}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"minLength": 1}},
            {"patternProperties": {r"^[\s\S]{1,}$": True}, "additionalProperties": False},
        ),
        (
            {"properties": {"a": {}}, "unevaluatedProperties": False},
            {"properties": {"a": {}}, "additionalProperties": False},
        ),
        ({"properties": {"a": {"not": {}}}}, {"properties": {"a": False}}),
        ({"oneOf": [{"type": "null"}, CAT]}, {"anyOf": [{"type": "null"}, CAT]}),
        (
            {"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}], "$defs": {"c": CAT, "d": DOG}},
            {"anyOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}], "$defs": {"c": CAT, "d": DOG}},
        ),
        (
            {
                "oneOf": [{"$ref": "#/$defs/d"}, DOG | {"properties": {"kind": {"const": "wolf"}}}],
                "discriminator": {"propertyName": "kind"},
                "$defs": {"d": DOG},
            },
            {
                "anyOf": [
                    {"$ref": "#/$defs/d", "required": ["kind"]},
                    {"type": "object", "properties": {"kind": {"const": "wolf"}}, "required": ["kind"]},
                ],
                "discriminator": {"propertyName": "kind"},
                "$defs": {"d": DOG},
            },
        ),
        (
            {"$id": "N", "properties": {"a": {"$ref": "N"}, "b/c": {"$anchor": "x"}, "d": {"$ref": "#x"}}},
            {
                "$id": "N",
                "properties": {
                    "a": {"$ref": "#"},
                    "b/c": {"$anchor": "x"},
                    "d": {"$ref": "#/properties/b~1c"},
                },
            },
        ),
    ],
    ids=str,
)
def test_keywords_are_said_by_others(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert expressible(schema) == expected
    texts = [
        text for seed in range(20) if (text := written({"type": "object", **schema}, seed, 300)) is not None
    ]
    for text in texts:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


def test_schemas_are_visited_and_values_are_not() -> None:
    schema = {
        "properties": {"properties": {"const": {"a": {}}}, "enum": {"items": [True, {"x": 1}]}},
        "required": ["a"],
        "discriminator": {"propertyName": "a"},
    }
    paths = sorted(path for path, _ in inner_schemas(schema))
    assert paths == [
        (),
        ("properties", "enum"),
        ("properties", "enum", "items", "1"),
        ("properties", "properties"),
    ]


def test_references_are_followed_to_their_keywords() -> None:
    root = {"$defs": {"a": {"$ref": "#/$defs/b", "title": "a"}, "b": {"type": "null"}, "yes": True}}
    assert resolved(root, {"$ref": "#/$defs/a", "enum": [1]}) == {"type": "null", "title": "a", "enum": [1]}
    assert resolved(root, {"$ref": "#/$defs/yes"}) is True
    for kept in (
        {"$ref": "#/none"},
        {"$ref": "x.json", "type": "null"},
        {"$ref": "#/$defs/yes", "type": "null"},
        5,
    ):
        assert resolved(root, kept) == kept
