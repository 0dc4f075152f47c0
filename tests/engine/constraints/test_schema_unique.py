"""Arrays without repeated items are listed where they are few, and refused otherwise."""

from itertools import product
from typing import Any

import jsonschema
import pytest

from engine.constraints.schema_neutral import expressible
from tests.engine.constraints.test_schema_corpus import problem_of
from tests.engine.constraints.test_schema_objects import takes

LETTERS = {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True}


@pytest.mark.parametrize(
    "schema",
    [
        LETTERS,
        LETTERS | {"minItems": 1},
        LETTERS | {"maxItems": 2, "title": "t", "default": []},
        LETTERS | {"items": {"const": "a", "description": "one"}},
        LETTERS | {"items": {"enum": ["a", "a", "b"]}},
        LETTERS | {"items": {"$ref": "#/$defs/l"}, "$defs": {"l": {"type": "integer", "enum": [1, 2]}}},
        {"uniqueItems": True, "maxItems": 1, "items": {"enum": ["a", 1]}, "type": ["array", "null"]},
    ],
    ids=str,
)
def test_every_array_is_allowed_that_matches(schema: dict[str, Any]) -> None:
    assert problem_of(schema) == ""
    for length in range(4):
        for items in product(("a", "b", 1, 2), repeat=length):
            matches = jsonschema.Draft202012Validator(schema).is_valid([*items])
            assert takes(schema, [*items]) is matches, items


@pytest.mark.parametrize(
    "kept",
    [
        LETTERS | {"items": {"type": "string"}},
        LETTERS | {"items": {"enum": ["a", ["b"]]}},
        LETTERS | {"items": {"enum": ["a", 1], "type": "string"}},
        LETTERS | {"items": {"enum": ["ab", "a"], "minLength": 2}},
        LETTERS | {"prefixItems": [{"const": "a"}]},
        LETTERS | {"contains": {"const": "a"}},
        LETTERS | {"type": ["array", "null"]},
        LETTERS | {"items": {"enum": ["a", "b", "c", "d", "e", "f"]}},
    ],
    ids=str,
)
def test_others_stay_as_they_are(kept: dict[str, Any]) -> None:
    assert expressible(kept) == kept
    assert "uniqueItems" in problem_of(kept)


def test_more_items_than_values_match_nothing() -> None:
    assert expressible({"properties": {"a": LETTERS | {"minItems": 4}}}) == {"properties": {"a": False}}


def test_the_arrays_of_a_document_are_bounded() -> None:
    many = {
        "properties": {f"p{number}": LETTERS | {"items": {"enum": [*range(5)]}} for number in range(3000)}
    }
    found = expressible(many)["properties"].values()
    assert 0 < sum("anyOf" in node for node in found) < 20
