"""The number of patterns and multiples that apply to one value of a schema is bounded."""

from typing import Any

import pytest

from engine.constraints.schema_rewrite import ready


def contains(letters: str) -> list[dict[str, Any]]:
    return [{"pattern": f".*{letter}.*"} for letter in letters]


DEFINED = {"$defs": dict(zip("abcdefghi", contains("abcdefghi"), strict=True))}
TOO_MANY: list[dict[str, Any]] = [
    {"type": "string", "allOf": contains("abcdefghijklmnopqrst")},
    {"allOf": [{"properties": {"x": part}} for part in contains("abcdefghi")]},
    {"items": {"allOf": [{"$ref": f"#/$defs/{letter}"} for letter in "abcdefghi"]}, **DEFINED},
    {
        "$ref": "#/$defs/c8",
        "pattern": "b",
        "$defs": {
            "c0": {"pattern": "a"},
            **{f"c{i}": {"pattern": "a", "$ref": f"#/$defs/c{i - 1}"} for i in range(1, 9)},
        },
    },
    {"x y": contains("abcdefghi"), "allOf": [{"$ref": f"#/x%20y/{i}"} for i in range(9)]},
    {"allOf": [{"anyOf": contains("abcdefghi")}] * 9},
]


@pytest.mark.parametrize("schema", TOO_MANY, ids=lambda schema: str(schema)[:60])
def test_the_patterns_of_one_value_are_bounded(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="patterns apply to the same text"):
        ready(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": contains("abcdefgh")},
        {"anyOf": contains("abcdefghijklmnopqrst")},
        {"allOf": [{"properties": {str(i): part}} for i, part in enumerate(contains("abcdefghijkl"))]},
        {"$defs": {"tree": {"properties": {"left": {"$ref": "#/$defs/tree"}, "name": {"pattern": "a"}}}}}
        | {"allOf": [{"$ref": "#/$defs/tree"}, {"type": "object"}]},
        {"oneOf": [{"prefixItems": contains("abcdefghij")}, {"type": "null"}], "discriminator": {}},
        {"properties": {"a": {"multipleOf": 1024}, "b": {"multipleOf": 25}, "c": {"multipleOf": 65_536}}},
        {"type": "number", "minimum": 0, "exclusiveMaximum": 0.5},
    ],
    ids=lambda schema: str(schema)[:60],
)  # fmt: skip
def test_patterns_of_different_values_are_not_counted_together(schema: dict[str, Any]) -> None:
    assert ready(schema) == schema


def test_counting_merges_is_fast() -> None:
    """References that double at every level have as many places as leaves."""
    doubled = {
        f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}, "b": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(40)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**doubled, "d40": {"pattern": "a"}}}
    assert ready(schema) == schema, "nothing is merged"
    with pytest.raises(ValueError, match="too many parts"):
        ready(schema | {"type": "object"})
