"""The schemas that libraries write: which are accepted, which are refused, and that each keyword is enforced.

The corpus holds what pydantic 2.14, zod 4.6, TypeBox 0.34 and msgspec 0.22 generate for each of their types,
and samples in the style of json-schema-to-typescript. `pytest -s` prints the table of its keywords.
"""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from referencing.exceptions import Unresolvable

from engine.constraints.grammar import compile_grammar
from engine.constraints.schema_walk import ANNOTATIONS, inner_schemas
from engine.request import Grammar
from tests.engine.constraints.test_schema_objects import takes
from tests.engine.tiny_engine import EOS, tiny_tokenizer, tiny_vocabulary

CORPUS: dict[str, dict[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("schema_corpus.json").read_text(encoding="utf-8")
)
SCHEMAS = {f"{library} {name}": schema for library, names in CORPUS.items() for name, schema in names.items()}

# What is refused, and the word that the error has for it.
REFUSED = {
    "pydantic set": "uniqueItems",
    "pydantic frozenset": "uniqueItems",
    "pydantic pattern": "regex",
    "msgspec set": "uniqueItems",
    "msgspec frozenset": "uniqueItems",
    "typebox arrayUnique": "uniqueItems",
    "typebox arrayContains": "contains",
    "typebox never": "not",
    "typebox not": "not",
    "typebox regexp": "RegExp",
    "typebox date": "Date",
    "typebox u8": "Uint8Array",
    "typebox bigint": "bigint",
}

OBJECT = {"type": "object"}
TAGGED = [{"properties": {"k": {"const": tag}}, "required": ["k"], **OBJECT} for tag in "ab"]
# Of each keyword: a schema, a value that it allows, and one that it does not.
ENFORCED: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, None, 1),
    "additionalItems": (
        {"items": [{"type": "null"}], "additionalItems": False, "type": "array"},
        [None],
        [None, 1],
    ),
    "additionalProperties": ({**OBJECT, "additionalProperties": {"type": "null"}}, {"a": None}, {"a": 1}),
    "allOf": ({"allOf": [{"type": ["null", "integer"]}, {"type": ["null", "string"]}]}, None, 1),
    "anyOf": ({"anyOf": [{"type": "null"}, {"type": "string"}]}, "a", 1),
    "const": ({"const": "a"}, "a", "b"),
    "discriminator": ({"oneOf": TAGGED, "discriminator": {"propertyName": "k"}}, {"k": "a"}, {"k": "c"}),
    "enum": ({"enum": ["a", 1]}, 1, 2),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 5}, 4, 5),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 5}, 6, 5),
    "format": ({"type": "string", "format": "date"}, "2024-02-29", "2024-02-30"),
    "items": ({"type": "array", "items": {"type": "null"}}, [None], [1]),
    "maxItems": ({"type": "array", "maxItems": 1}, [1], [1, 2]),
    "maxLength": ({"type": "string", "maxLength": 1}, "a", "ab"),
    "maximum": ({"type": "integer", "maximum": 5}, 5, 6),
    "minItems": ({"type": "array", "minItems": 1}, [1], []),
    "minLength": ({"type": "string", "minLength": 1}, "a", ""),
    "minProperties": ({**OBJECT, "minProperties": 1}, {"a": 1}, {}),
    "minimum": ({"type": "integer", "minimum": 5}, 5, 4),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, 10, 11),
    "oneOf": ({"oneOf": TAGGED}, {"k": "b"}, {"k": "c"}),
    "pattern": ({"type": "string", "pattern": "^a+$"}, "aa", "b"),
    "patternProperties": (
        {**OBJECT, "patternProperties": {"^a": {"type": "null"}}, "additionalProperties": False},
        {"a1": None},
        {"a1": 1},
    ),
    "prefixItems": ({"type": "array", "prefixItems": [{"type": "null"}]}, [None], [1]),
    "properties": ({**OBJECT, "properties": {"a": {"type": "null"}}}, {"a": None}, {"a": 1}),
    "propertyNames": ({**OBJECT, "propertyNames": {"enum": ["a"]}}, {"a": 1}, {"b": 1}),
    "required": ({**OBJECT, "properties": {"a": {}}, "required": ["a"]}, {"a": 1}, {}),
    "type": ({"type": "string"}, "a", 1),
    "unevaluatedProperties": (
        {**OBJECT, "properties": {"a": {}}, "unevaluatedProperties": False},
        {"a": 1},
        {"b": 1},
    ),
}
# Keywords that restrict nothing: containers, and those of other vocabularies.
WITHOUT_EFFECT = ANNOTATIONS | {
    "$defs",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "definitions",
    "deprecated",
    "id",
    "tsEnumNames",
    "tsType",
}
# Accepted where their value restricts nothing.
NEUTRAL = {"minContains", "not", "uniqueItems"}


def problem_of(schema: dict[str, Any]) -> str:
    """Return why a schema is refused, empty if it is accepted."""
    try:
        compile_grammar(Grammar("json_schema", json.dumps(schema)), tiny_vocabulary())
    except ValueError as error:
        return str(error)
    return ""


def drawn(schema: dict[str, Any], seed: int, max_tokens: int = 120) -> str | None:
    """Return a text that a schema allows, with a liking for its end; None if it did not end."""
    draw = random.Random(seed)
    matcher = compile_grammar(
        Grammar("json_schema", json.dumps(schema), whitespace=""), tiny_vocabulary()
    ).new_matcher()
    ends = {tiny_tokenizer().token_to_id(char) for char in '"}]'}
    token_ids: list[int] = []
    for _ in range(max_tokens):
        words = tiny_vocabulary().masks([matcher])
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        if not allowed or EOS in allowed:
            return str(tiny_tokenizer().decode(token_ids))
        preferred = [token_id for token_id in allowed if token_id in ends]
        token_ids.append(draw.choice(preferred if preferred and draw.random() < 0.5 else allowed))
        matcher.consume_tokens(token_ids[-1:])
    return None


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_of_libraries_are_enforced_or_refused_by_name(name: str) -> None:
    schema = SCHEMAS[name]
    assert (REFUSED[name] in problem_of(schema)) if name in REFUSED else problem_of(schema) == ""
    if name in REFUSED:
        return
    if "\\p{" in str(schema.get("pattern")):
        return  # Python's expressions know no properties of characters
    texts = [text for seed in range(12) if (text := drawn(schema, seed)) is not None]
    assert texts or name == "zod endsWith", "drawn at random, that one seldom ends"
    for text in texts:
        try:
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
        except jsonschema.SchemaError:  # of an earlier draft
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft7Validator)
        except Unresolvable:
            pass  # a reference by name, which that library does not find


def test_every_accepted_keyword_is_enforced_or_restricts_nothing() -> None:
    accepted, refused = Counter[str](), Counter[str]()
    for name, schema in SCHEMAS.items():
        keywords = {keyword for _, node in inner_schemas(schema) for keyword in node}
        (refused if name in REFUSED else accepted).update(keywords)
    print(f"\n{'keyword':24}accepted refused enforced")
    for keyword in sorted(accepted | refused):
        print(f"{keyword:24}{accepted[keyword]:8}{refused[keyword]:8} {'yes' if keyword in ENFORCED else ''}")
    assert accepted.keys() - ENFORCED.keys() - WITHOUT_EFFECT <= NEUTRAL
    assert len(REFUSED) * 10 < len(SCHEMAS)


@pytest.mark.parametrize("keyword", ENFORCED)
def test_keywords_are_enforced(keyword: str) -> None:
    schema, right, wrong = ENFORCED[keyword]
    assert takes(schema, right), "allowed"
    assert not takes(schema, wrong), "not allowed"
