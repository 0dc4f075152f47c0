"""Rewritten schemas are enforced exactly by llguidance, and cost little."""

import json
import math
import random
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.constraints.grammar import compile_grammar
from engine.constraints.schema_rewrite import (
    MAX_BOUND,
    MAX_DEPTH,
    load,
    ready,
    ready_leniently,
    without_patterns,
)
from engine.request import Grammar
from tests.engine.tiny_engine import EOS, tiny_tokenizer, tiny_vocabulary


def written(schema: dict[str, Any], seed: int, max_tokens: int = 60) -> str | None:
    """A text that the grammar of a schema allows, drawn at random; None if it did not end."""
    draw = random.Random(seed)
    matcher = compile_grammar(Grammar("json_schema", json.dumps(schema)), tiny_vocabulary()).new_matcher()
    token_ids: list[int] = []
    for _ in range(max_tokens):
        words = tiny_vocabulary().masks([matcher])
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        if not allowed or (EOS in allowed and draw.random() < 0.3):
            return tiny_tokenizer().decode(token_ids)
        token_ids.append(draw.choice([token_id for token_id in allowed if token_id != EOS] or [EOS]))
        if token_ids[-1] == EOS:
            return tiny_tokenizer().decode(token_ids[:-1])
        matcher.consume_tokens(token_ids[-1:])
    return None


NUMBERS = [
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-20},
    {"type": "number", "exclusiveMinimum": 5, "maximum": 5.5},
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": -1},
    {"exclusiveMinimum": -0.25, "exclusiveMaximum": 0, "type": "number"},
    {"type": "number", "exclusiveMinimum": 0},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    {"type": "integer", "minimum": 2**60, "maximum": 2**60 + 3000},
    {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 9},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
    {"type": "number", "exclusiveMinimum": -0.001, "exclusiveMaximum": -0.0009999990000000001},
    {"type": "number", "minimum": 0, "exclusiveMaximum": 1.0099999999999999e-07},
    {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
    {"enum": [3.141592653589793, 2.718281828459045, 0.30000000000000004]},
    {"const": 2**53},
    {"enum": [1e22, 0.1, 2.5e-10, -(2**53)]},
    {"anyOf": [{"type": "number", "exclusiveMinimum": 7, "exclusiveMaximum": 7.125}, {"const": "a"}]},
]


@pytest.mark.parametrize("schema", NUMBERS, ids=json.dumps)
def test_numbers_keep_to_their_bounds(schema: dict[str, Any]) -> None:
    texts = [text for seed in range(40) if (text := written(schema, seed)) is not None]
    assert texts, "numbers are short"
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"const": 2**53 + 1}, "const"),
    ({"enum": ["a", {"b": [123456789012345678]}]}, "enum"),
    ({"const": 123456789.12345679}, "123456789.12345679"),
    ({"minimum": 10**20}, "bound"),
    ({"maximum": -(10**400)}, "bound"),
    ({"minimum": 1e999}, "minimum"),
    ({"const": math.inf}, "const"),
    ({"multipleOf": 16_777_217}, "multipleOf"),
    ({"multipleOf": 1.0000019}, "multipleOf"),
    ({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, "multipleOf"),
    ({"properties": {"a": {"items": {"const": 2**60}}}}, "const"),
    ({"type": "number", "exclusiveMinimum": 99999999999999.1, "maximum": 99999999999999.2}, "near"),
    ({"type": "number", "exclusiveMinimum": 0.0, "exclusiveMaximum": 5e-324}, "near"),
]


@pytest.mark.parametrize(("schema", "hint"), REFUSED, ids=lambda value: str(value)[:60])
def test_unenforceable_keywords_are_refused_or_dropped(schema: dict[str, Any], hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        ready(schema)
    left = ready_leniently(schema, lambda text: True)
    assert ready(left) == left != schema


def test_lenient_schemas_lose_only_unsupported_keywords() -> None:
    schema = {
        "type": "object",
        "properties": {
            "pattern": {"type": "string", "pattern": "(?=a)b", "maxLength": 3},
            "$ref": {"$ref": "other.json"},
            "known": {"$ref": "#/$defs/known"},
            "big": {"type": "integer", "multipleOf": 99_991, "minimum": 0, "maximum": 2**70},
        },
        "patternProperties": {"(?!x)": {"type": "string"}, "^y": {"type": "string"}},
        "additionalProperties": False,
        "$defs": {"known": {"pattern": "^a$", "const": "a"}},
        "x-guidance": {"lenient": True},
    }
    assert ready_leniently(schema, lambda text: "(?" not in text) == {
        "type": "object",
        "properties": {
            "pattern": {"type": "string", "maxLength": 3},
            "$ref": {},
            "known": {"$ref": "#/$defs/known"},
            "big": {"type": "integer", "minimum": 0, "maximum": MAX_BOUND},
        },
        "patternProperties": {"^y": {"type": "string"}},
        "$defs": {"known": {"pattern": "^a$", "const": "a"}},
        "x-guidance": {"lenient": True},
    }


def test_dropped_patterns_leave_their_properties_allowed() -> None:
    closed = {
        "patternProperties": {"^a": {"pattern": "b"}},
        "additionalProperties": False,
        "const": {"pattern": 1},
    }
    schema = {
        "items": [closed],
        "properties": {"pattern": {"format": "date", "maxLength": 3}},
        "multipleOf": 3,
    }
    assert without_patterns(schema) == {
        "items": [{"const": {"pattern": 1}}],
        "properties": {"pattern": {"maxLength": 3}},
    }


def test_thousands_of_long_numbers_are_checked_in_one_pass() -> None:
    draw = random.Random(0)
    ready({"enum": [round(draw.random(), 12) for _ in range(10_000)]})
    with pytest.raises(ValueError, match="enum has the number"):
        ready({"enum": [draw.random() for _ in range(10_000)]})
    ready({"enum": [{"a": [3.141592653589793]}] * 10_000})


def test_names_of_properties_and_values_are_no_keywords() -> None:
    schema = {
        "properties": {"multipleOf": {"type": "number"}, "const": {"maximum": 2**63 - 1}},
        "const": {"pattern": "(?=a)", "minimum": 3, "exclusiveMinimum": True},
        "default": 2**80,
        "examples": [2**80],
        "minimum": True,
    }
    found = ready(schema)
    assert found == schema | {
        "properties": {"multipleOf": {"type": "number"}, "const": {"maximum": MAX_BOUND}}
    }


BOUNDS = st.decimals(-3, 3, places=3).map(float) | st.floats(-1e6, 1e6)


@settings(max_examples=200)
@given(lower=BOUNDS, upper=BOUNDS)
def test_a_number_on_an_exclusive_bound_is_never_allowed(lower: float, upper: float) -> None:
    schema = {"type": "number", "exclusiveMinimum": lower, "exclusiveMaximum": upper}
    try:
        grammar = compile_grammar(Grammar("json_schema", json.dumps(schema)), tiny_vocabulary())
    except ValueError:
        return  # there is none between, or they are too near to each other
    for bound in (lower, upper):
        shortest = format(Decimal(repr(bound)).normalize(), "f")
        for text in {shortest, shortest + ("0" if "." in shortest else ".0")}:
            matcher = grammar.new_matcher()
            is_taken = matcher.consume_tokens(tiny_tokenizer().encode(text, add_special_tokens=False).ids)
            assert not (is_taken and matcher.is_accepting()), text


def test_ids_of_documents_are_dropped() -> None:
    schema = {"$schema": "https://example.com/s.json", "$id": "https://example.com/a", "type": "object"}
    assert ready(schema) == {"type": "object"}
    draft = {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"$id": {"type": "string"}}}
    assert ready(draft) == draft


@pytest.mark.parametrize("reference", ["#other", "#/$defs/no", "#/allOf/7", "other.json#/a", "https://x/y"])
def test_references_must_point_into_the_schema(reference: str) -> None:
    schema = {"allOf": [{"$ref": reference}, {"type": "string"}], "$defs": {"a": {"$anchor": "name"}}}
    with pytest.raises(ValueError, match=r"the \$ref .* points (to nothing|outside the schema)"):
        ready(schema)
    assert "$ref" not in json.dumps(ready_leniently(schema, lambda text: True))


@pytest.mark.parametrize(
    ("source", "hint"),
    [('{"const": NaN}', "NaN"), ('{"const": -Infinity}', "Infinity"), ("[1]", "object"), ("3", "object")],
)
def test_invalid_json_is_refused(source: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        load(source)
    assert load("true") == {} and load('{"a": 1}') == {"a": 1}


def test_depth_is_bounded() -> None:
    schema: dict[str, Any] = {}
    for _ in range(MAX_DEPTH):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="nested"):
        ready(schema)
    assert ready(schema["items"]) == schema["items"]
