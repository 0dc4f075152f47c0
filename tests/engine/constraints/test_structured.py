"""Models of random weights obey grammars, through the whole engine."""

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from engine.errors import InvalidRequest
from engine.outputs import FinishReason
from engine.request import Grammar
from tests.engine.tiny_engine import EOS, answers, tiny_engine, tiny_request, tiny_tokenizer

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def closed(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """An object that has these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


SHORT = {"type": "string", "maxLength": 5}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMAS: dict[str, Any] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "bounded integer": {"type": "integer", "minimum": -20, "maximum": 1300},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "bounded number": {"type": "number", "minimum": 0.5, "maximum": 2.25},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 7},
    "bounded string": {"type": "string", "minLength": 2, "maxLength": 6},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "unicode pattern": {"type": "string", "pattern": "^[äöüß中文]{1,4}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "address": {"type": "string", "format": "ipv4"},
    "enum": {"enum": ["rot", "grün", "blå", 7, None, True, [1, 2], {"a": "\u2028"}]},
    "const": {"const": {"kind": "fixed", "quote": 'say "ä"', "n": [1, 2.5, None]}},
    "enum of numbers": {"type": "integer", "enum": [1, 10, 100]},
    "array": {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [DIGIT, SHORT], "items": False, "minItems": 2},
    "array of arrays": {
        "type": "array",
        "maxItems": 3,
        "items": {"type": "array", "maxItems": 2, "items": DIGIT},
    },
    "object": closed(name=SHORT, age=DIGIT),
    "optional": closed(["b"], a=DIGIT, b={"type": "boolean"}, c={"type": "null"}),
    "all optional": closed([], a=DIGIT, b=DIGIT),
    "nested": closed(
        user=closed(name=SHORT, tags={"type": "array", "items": SHORT, "maxItems": 2}), ok=DIGIT
    ),
    "nullable": closed(a={"type": ["integer", "null"], "minimum": 0, "maximum": 9}),
    "anyOf": {"anyOf": [DIGIT, closed(x=DIGIT), {"const": "neither"}]},
    "oneOf": {"oneOf": [closed(kind={"const": "a"}, n=DIGIT), closed(kind={"const": "b"}, s=SHORT)]},
    "allOf": {"allOf": [closed(a=DIGIT), {"properties": {"a": {"minimum": 5}}}]},
    "ref": {"$defs": {"digit": DIGIT}, **closed(a={"$ref": "#/$defs/digit"}, b={"$ref": "#/$defs/digit"})},
    "old ref": {"definitions": {"digit": DIGIT}, "type": "array", "items": {"$ref": "#/definitions/digit"}},
    "recursive": TREE,
    "map": {"type": "object", "additionalProperties": DIGIT, "maxProperties": 2},
    "escaped names": closed(**{'a"b': DIGIT, "ü\\n": DIGIT, "": DIGIT}),
    "anything": {},
}


def of_schema(schema: Any, **options: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema), **options)


def tokens_of(text: str) -> list[int]:
    ids: list[int] = tiny_tokenizer().encode(text, add_special_tokens=False).ids
    return ids


async def test_random_models_obey_every_schema(run_ahead):
    requests = [
        tiny_request("x" * (3 * index + 1), seed=index, max_tokens=150, grammar=of_schema(schema))
        for index, schema in enumerate(SCHEMAS.values())
    ]
    async with tiny_engine(run_ahead=run_ahead) as engine:
        results = await answers(engine, [request for request in requests for _ in range(2)])
        assert engine.stats().constrained_steps_total > 0
    names = [name for name in SCHEMAS for _ in range(2)]
    num_whole = 0
    for name, delta in zip(names, results, strict=True):
        if delta.finish_reason is FinishReason.LENGTH:
            continue
        assert delta.finish_reason is FinishReason.STOP, name
        num_whole += 1
        value = json.loads(delta.text)
        try:
            jsonschema.validate(value, SCHEMAS[name], jsonschema.Draft202012Validator)
        except jsonschema.ValidationError as error:
            pytest.fail(f"{name}: {delta.text!r}: {error.message}")
    assert num_whole > len(results) * 2 // 3, "most of these schemas cannot be filled for ever"


async def test_any_json_object():
    async with tiny_engine() as engine:
        requests = [
            tiny_request("a", seed=seed, max_tokens=400, grammar=Grammar("json_object"), logit_bias=close)
            for seed, close in enumerate([bias('"', "}", by=4.0)] * 8)
        ]
        results = await answers(engine, requests)
    whole = [delta.text for delta in results if delta.finish_reason is FinishReason.STOP]
    assert whole and all(isinstance(json.loads(text), dict) for text in whole)


def bias(*texts: str, by: float) -> tuple[tuple[int, float], ...]:
    return tuple((tokens_of(text)[0], by) for text in texts)


async def test_regex_choice_and_ebnf(run_ahead):
    gbnf = 'root ::= item ("," item)*\nitem ::= [a-c] [0-9]?\n'
    lark = 'start: item ("," item)*\nitem: /[a-c][0-9]?/\n'
    cases = [
        (Grammar("regex", r"[0-9]{3}-(ä|中){2}"), r"[0-9]{3}-(ä|中){2}"),
        (Grammar("choice", json.dumps(["ja", "nein", 'vielleicht "später"'])), 'ja|nein|vielleicht "später"'),
        (Grammar("ebnf", gbnf), r"[a-c][0-9]?(,[a-c][0-9]?)*"),
        (Grammar("ebnf", lark), r"[a-c][0-9]?(,[a-c][0-9]?)*"),
    ]
    async with tiny_engine(run_ahead=run_ahead) as engine:
        for grammar, pattern in cases:
            for delta in await answers(
                engine, [tiny_request("q", seed=i, grammar=grammar) for i in range(4)]
            ):
                assert re.fullmatch(pattern, delta.text), (grammar.source, delta.text)
                assert delta.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("has_eos", [True, False])
async def test_an_output_ends_when_no_token_is_allowed(has_eos, run_ahead):
    grammar = Grammar("choice", '["abc"]')
    async with tiny_engine(has_eos=has_eos, run_ahead=run_ahead) as engine:
        for options in ({}, {"min_tokens": 20}, {"ignore_eos": True}, {"include_stop_str_in_output": True}):
            [delta] = await answers(engine, [tiny_request("q", grammar=grammar, **options)])
            assert (delta.text, delta.finish_reason) == ("abc", FinishReason.STOP), options
            assert (delta.num_tokens, delta.stop_reason) == (3, None), options
        [empty] = await answers(engine, [tiny_request("q", grammar=Grammar("regex", ""))])
        assert (empty.text, empty.finish_reason) == ("", FinishReason.STOP)


async def test_eos_only_where_the_grammar_may_end():
    async with tiny_engine() as engine:
        grammar = Grammar("regex", "[a-z]{4}[a-z]*")
        eager = ((EOS, 100.0),)
        [delta] = await answers(engine, [tiny_request("q", grammar=grammar, logit_bias=eager)])
        assert re.fullmatch("[a-z]{4,}", delta.text) and delta.num_tokens <= 5
        options = {"grammar": grammar, "logit_bias": eager, "min_tokens": 9}
        [delta] = await answers(engine, [tiny_request("q", **options)])
        assert delta.num_tokens == 10 and delta.finish_reason is FinishReason.STOP, "both hold"


async def test_together_with_other_restrictions():
    grammar, word = Grammar("regex", "[a-z]*"), Grammar("regex", "[a-z]+")
    async with tiny_engine() as engine:
        allowed = frozenset([*tokens_of("xyz."), EOS])
        [delta] = await answers(engine, [tiny_request("q", grammar=grammar, allowed_token_ids=allowed)])
        assert set(delta.text) <= set("xyz")
        [delta] = await answers(engine, [tiny_request("q", grammar=grammar, stop=("e",), max_tokens=400)])
        assert "e" not in delta.text and delta.stop_reason in ("e", None)
        with pytest.raises(InvalidRequest, match="all that the request asks"):
            await answers(engine, [tiny_request("q", grammar=word, allowed_token_ids=frozenset([3]))])


async def test_unrestricted_streams_are_unaffected_by_grammars_beside_them(run_ahead):
    plain = [tiny_request("plain " * (i + 1), seed=i, max_tokens=40) for i in range(4)]
    strict = [tiny_request("x", seed=i, max_tokens=40, grammar=of_schema(TREE)) for i in range(4)]
    async with tiny_engine(run_ahead=run_ahead) as engine:
        alone = [(await answers(engine, [request]))[0].text for request in [*plain, *strict]]
        assert engine.stats().constrained_steps_total > 0
        together = await answers(engine, [*plain, *strict])
        assert [delta.text for delta in together] == alone
        before = engine.stats().constrained_steps_total
        await answers(engine, plain)
        assert engine.stats().constrained_steps_total == before, "no grammar, no wait"


async def test_preempted_and_resumed_the_output_is_the_same(run_ahead):
    requests = [
        tiny_request(f"number {i} ", seed=i, max_tokens=90, grammar=of_schema(SCHEMAS["nested"]))
        for i in range(6)
    ]
    async with tiny_engine(run_ahead=run_ahead) as engine:
        expected = [delta.text for delta in await answers(engine, requests)]
    async with tiny_engine(run_ahead=run_ahead, kv_tokens=192, max_model_len=128, overcommit=1.0) as engine:
        results = await answers(engine, requests)
        assert engine.stats().preemptions_total > 0, "too much room to preempt anything"
    assert [delta.text for delta in results] == expected


async def test_samples_of_one_prompt_and_cached_prefixes(run_ahead):
    """Chunked prefill, followers that share pages, and a second round out of the prefix cache."""
    prompt = "a long beginning that many have " * 4
    async with tiny_engine(run_ahead=run_ahead, token_budget=24) as engine:
        requests = await engine.prepare(
            [tiny_request(prompt, seed=i, grammar=of_schema(SCHEMAS["object"])) for i in range(3)]
        )
        first = [(await stream.collect()).text for stream in engine.submit_group(requests)]
        second = [(await stream.collect()).text for stream in engine.submit_group(requests)]
        assert engine.stats().cached_prompt_tokens_total > 0
    assert first == second and len(set(first)) > 1
    for text in first:
        jsonschema.validate(json.loads(text), SCHEMAS["object"])


async def test_whitespace_is_bounded():
    blanks = bias(" ", "\n", "\t", "\r", by=50.0)
    grammar = of_schema(closed(a=DIGIT))
    async with tiny_engine() as engine:
        [delta] = await answers(
            engine, [tiny_request("q", max_tokens=400, grammar=grammar, logit_bias=blanks)]
        )
        assert delta.finish_reason is FinishReason.STOP, "a model that loves blanks comes to an end, too"
        none = replace(grammar, whitespace="")
        [delta] = await answers(engine, [tiny_request("q", grammar=none, logit_bias=blanks)])
        assert not set(delta.text) & set(" \n\t\r")


async def test_an_aborted_output_leaves_nothing(run_ahead):
    async with tiny_engine(run_ahead=run_ahead) as engine:
        [request] = await engine.prepare(
            [tiny_request("q", max_tokens=300, grammar=Grammar("regex", "[a-z]*"))]
        )
        stream = engine.submit(request)
        await anext(aiter(stream))
        stream.abort()
        [delta] = await answers(engine, [tiny_request("q", grammar=Grammar("choice", '["ok"]'))])
        assert delta.text == "ok"
