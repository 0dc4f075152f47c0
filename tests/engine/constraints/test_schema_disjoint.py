"""Schemas without a common value are found, and only those."""

from typing import Any

import pytest

from engine.constraints.schema_disjoint import MAX_STEPS, DisjointSchemas

CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}, "age": {}}}
ROOT = {
    "$defs": {
        "cat": CAT,
        "dog": DOG,
        "text": {"type": "string"},
        "loop": {"$ref": "#/$defs/loop"},
        "self": {"anyOf": [{"$ref": "#/$defs/self"}, {"type": "null"}]},
    }
}


def ref(name: str, **more: Any) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}", **more}


@pytest.mark.parametrize(
    ("schemas", "expected"),
    [
        ([CAT, DOG], True),
        ([ref("cat"), ref("dog")], True),
        ([ref("cat"), {"type": "null"}], True),
        ([ref("cat", title="c"), {"anyOf": [{"type": "null"}, ref("dog")]}], True),
        ([{"allOf": [ref("cat")], "title": "c"}, ref("dog")], True),
        ([ref("text"), {"type": ["number", "null"]}, {"type": "array"}], True),
        ([{"const": 1}, {"const": True}, {"const": "1"}, {"enum": [None, 2]}], True),
        ([{"const": "a"}, {"type": "number"}], True),
        ([False, {}], True),
        ([CAT, {**CAT, "required": []}], False),
        ([{**CAT, "required": []}, DOG], False),
        ([{"properties": CAT["properties"], "required": ["kind"]}, DOG], True),
        ([{"properties": CAT["properties"], "required": ["kind"]}, {"properties": DOG["properties"]}], False),
        ([{"const": 1}, {"const": 1.0}], False),
        ([{"enum": [[1]]}, {"enum": [[2]]}], False),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"enum": [1]}, {"type": "integer"}], False),
        ([{"type": "string", "maxLength": 1}, {"type": "string", "minLength": 2}], False),
        ([ref("loop"), {"type": "null"}], False),
        ([ref("self"), {"type": "string"}], False),
        ([ref("missing"), {"type": "string"}], False),
        ([{}, True], False),
    ],
    ids=str,
)
def test_schemas_without_a_common_value_are_found(schemas: list[Any], expected: bool) -> None:
    assert DisjointSchemas(ROOT).are_disjoint(schemas) is expected
    assert DisjointSchemas(ROOT).are_disjoint(schemas[::-1]) is expected


def test_the_number_of_comparisons_is_bounded() -> None:
    root: dict[str, Any] = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 50}}}
    comparer = DisjointSchemas(root)
    assert not comparer.are_disjoint([{"$ref": "#/$defs/a"}] * 500)
    assert comparer._num_steps < 2 * MAX_STEPS
