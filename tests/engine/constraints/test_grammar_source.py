"""Grammars in every language are followed as written, or refused by name."""

import asyncio
import json
import threading

import pytest

import engine.constraints.grammar as room
from engine.constraint import MatchState
from engine.constraints import grammar_source, schema_rewrite
from engine.errors import InvalidRequest
from engine.request import Grammar
from tests.engine.tiny_engine import EOS, allowed, tiny_tokenizer, tiny_vocabulary


def schema(value) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    "grammar",
    [
        schema({"const": "a<turn>b"}),
        schema({"type": "object", "properties": {"<eos>": {"const": 1}}, "required": ["<eos>"]}),
        schema({"type": "string", "pattern": "^<(t)urn>$"}),
        Grammar("json_schema", r'{"const": "\u003cturn\u003E"}'),
        Grammar("choice", '["<turn>"]'),
        Grammar("regex", r"x<turn>"),
        Grammar("regex", r"<[t]u{1}rn\x3e"),
        Grammar("ebnf", 'root ::= "<tu" "rn>"'),
    ],
    ids=lambda grammar: grammar.source,
)
async def test_text_never_spells_a_control_token(compiler, grammar):
    """The tokens that may follow never are control tokens, though their text would fit."""
    control = {
        token_id for token_id, token in tiny_tokenizer().get_added_tokens_decoder().items() if token.special
    }
    text, new = "", []
    matcher = (await compiler.compile(grammar)).start()
    for _ in range(100):
        token_ids, _ = allowed(matcher, *new)
        assert token_ids.isdisjoint(control - {EOS}), "a control token may follow " + repr(text)
        if EOS in token_ids or not token_ids:
            break
        new = [min(token_ids)]
        text += tiny_tokenizer().decode(new)
    assert "<turn>" in text or "<eos>" in text


BAD = {
    "no JSON": (Grammar("json_schema", "{"), "Expecting"),
    "no object": (Grammar("json_schema", "[1]"), "object"),
    "unknown type": (schema({"type": "text"}), "text"),
    "not supported": (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "not lenient": (schema({"not": {}, "x-guidance": {"lenient": True}}), "not"),
    "missing ref": (schema({"$ref": "#/$defs/nowhere"}), "nowhere"),
    "remote ref": (schema({"$ref": "http://127.0.0.1:9/schema"}), "127.0.0.1"),
    "circular ref": (schema({"$ref": "#"}), ""),
    "empty": (schema(False), ""),
    "contradiction": (schema({"type": "integer", "minimum": 5, "maximum": 3}), "greater"),
    "deep": (Grammar("json_schema", nested(schema_rewrite.MAX_DEPTH)), "nested deeper"),
    "very deep": (Grammar("json_schema", nested(5000)), "too deeply"),
    "large": (schema({"enum": ["x" * grammar_source.MAX_SOURCE_CHARS]}), "characters"),
    "many cases": (
        schema(
            {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(5)]} for i in range(20)]}
        ),
        "too large",
    ),
    "bad regex": (Grammar("regex", "(a"), "unclosed"),
    "look-around": (Grammar("regex", "(?=a)b"), "look-around"),
    "huge regex": (Grammar("regex", "(" * 1000 + "a" + "{1,1000})" * 1000), ""),
    "NUL": (Grammar("regex", "a\0b"), "NUL"),
    "no match": (Grammar("regex", "[^\\s\\S]"), ""),
    "no list": (Grammar("choice", '"a"'), "choices"),
    "no choices": (Grammar("choice", "[]"), "choices"),
    "no strings": (Grammar("choice", "[1]"), "strings"),
    "half an escape": (Grammar("regex", "a\\"), "backslash"),
    "half an escape more": (Grammar("regex", "a\\\\\\"), "backslash"),
    "many choices": (Grammar("choice", json.dumps(["a"] * (grammar_source.MAX_CHOICES + 1))), "at most"),
    "many at once": (
        Grammar("ebnf", "start: A\nA: " + " & ".join(f"/.*{letter}.*/" for letter in "abcdefghij")),
        "same text",
    ),
    "bad grammar": (Grammar("ebnf", "root ::= missing"), "missing"),
    "no grammar": (Grammar("ebnf", "once upon a time"), ""),
    "deep grammar": (Grammar("ebnf", "root ::= " + "(" * 10_000), ""),
    "large grammar": (Grammar("ebnf", "root ::= " + '"a" ' * grammar_source.MAX_EBNF_CHARS), "characters"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_grammar_is_refused_by_name(compiler, name):
    grammar, hint = BAD[name]
    grammar = Grammar(grammar.kind, grammar.source, param="response_format", label="schema for 'x'")
    with pytest.raises(InvalidRequest) as caught:
        await compiler.compile(grammar)
    message = str(caught.value)
    assert caught.value.param == "response_format"
    assert message.startswith("Invalid schema for 'x': ") and len(message) < 1100
    assert hint in message, message


MANY = [f"a{number}" for number in range(grammar_source.MAX_CHOICES)]


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("choice", json.dumps(MANY)),
        Grammar("regex", "|".join(MANY)),
        schema({"enum": MANY}),
        Grammar("ebnf", "root ::= " + "|".join(f'"{text}"' for text in MANY[:4000])),
    ],
    ids=lambda grammar: grammar.kind,
)
async def test_thousands_of_alternatives_compile_and_run(compiler, grammar):
    """A limit of the library on what may be open at once would strike behind the first token."""
    text = "a3999" if grammar.kind != "json_schema" else '"a3999"'
    matcher = (await compiler.compile(grammar)).start()
    new = []
    for token_id in tiny_tokenizer().encode(text, add_special_tokens=False).ids:
        assert token_id in allowed(matcher, *new)[0], f"{text} ends after {new}"
        new = [token_id]
    assert allowed(matcher, *new)[1] is MatchState.MAY_STOP


@pytest.mark.parametrize("is_closed", [False, True])
async def test_an_object_may_have_thousands_of_optional_properties(compiler, is_closed):
    properties = {f"k{number}": {"type": "integer"} for number in range(2000)}
    grammar = schema({"type": "object", "properties": properties, "additionalProperties": not is_closed})
    matcher = (await compiler.compile(grammar)).start()
    new = []
    for token_id in tiny_tokenizer().encode('{"k7":1,"k1999":2}', add_special_tokens=False).ids:
        assert token_id in allowed(matcher, *new)[0], f"ends after {new}"
        new = [token_id]


FOLLOWED = [
    ('root ::= "\\x41\\u00e9" [\\u0400-\\u04FF] "\\u0022\\x5c"', 'AéЖ"\\'),
    ('root ::= [\\u00a0\\u002d\\x5d] [\\u0001-\\u001f] "\\x22\\x5c\\x5b]"', ']\n"\\[]'),
    ('start: "%json {  }" /%json [{]"a":  1}/', '%json {  }%json {"a":  1}'),
    ('# a comment\nroot ::= [^"] "::="', "a::="),
    ('?start: expr\n?expr: NUM | expr "+" NUM\nNUM: /[0-9]/', "1+2"),
    ('start[capture]: "a"', "a"),
    ("start: A\nA: T & U // both\nT: /a+/\nU: /.{3}/", "aaa"),
    ('start: %json {"const": 1}', "1"),
    ('start: "x" <turn>', "x<turn>"),
    ('start: "x" // <turn>\n', "x"),
]


@pytest.mark.parametrize(("source", "text"), FOLLOWED)
async def test_features_of_each_grammar_language(compiler, source, text):
    matcher, new = (await compiler.compile(Grammar("ebnf", source))).start(), []
    for token_id in tiny_tokenizer().encode(text, add_special_tokens=False).ids:
        assert token_id in allowed(matcher, *new)[0], f"{text!r} ends after {new}"
        new = [token_id]
    assert allowed(matcher, *new)[1] is MatchState.MAY_STOP


@pytest.mark.parametrize("text", ["\x7f\x80", 'a"b\\\n', "\u2028é😀", "<turn>"])
async def test_choices_may_be_any_text(compiler, text):
    matcher, new = (await compiler.compile(Grammar("choice", json.dumps([text])))).start(), []
    decode = tiny_vocabulary().tokenizer.decode_bytes
    for data in text.encode():
        new = [token_id for token_id in allowed(matcher, *new)[0] if decode([token_id]) == bytes([data])]
        assert len(new) == 1, f"{text!r} cannot be written"
    assert allowed(matcher, *new)[1] is MatchState.MAY_STOP


async def test_errors_do_not_list_the_names_of_control_tokens(compiler):
    with pytest.raises(InvalidRequest) as caught:
        await compiler.compile(Grammar("ebnf", "start: <|nobody|>"))
    assert "nobody" in str(caught.value) and len(str(caught.value)) < 200, caught.value


async def test_a_grammar_that_exceeds_a_limit_reports_it(compiler):
    """What compiles may still run into a limit of the library behind many tokens."""
    matcher = (await compiler.compile(Grammar("ebnf", 'start: "a"{100000}'))).start()
    found, new = {0}, []
    for _ in range(5):
        found, state = allowed(matcher, *new)
        new = sorted(found)[:1]
    assert (found, state) == (set(), MatchState.MUST_CONTINUE)
    assert "limit" in matcher.problem, matcher.problem


# What costs other compilers minutes, and the characters with which such a text begins.
HOSTILE = {
    "many states": (Grammar("regex", "(a+)+(a|b)*a(a|b){200}((c{1,100}){1,100}){1,100}"), "a"),
    "backtracking": (schema({"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}), '"'),
    "long array": (schema({"type": "array", "minItems": 100_000, "items": {"type": "integer"}}), "["),
    "long string": (schema({"type": "string", "minLength": 100_000}), '"'),
    "doubled refs": (
        schema(
            {
                "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(25)}
                | {"d25": {"type": "integer"}},
                "$ref": "#/$defs/d0",
            }
        ),
        "-0123456789",
    ),
    "many values": (schema({"enum": [f"value {i}" for i in range(5000)]}), '"'),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_grammars_do_not_block_the_loop(compiler, monkeypatch, name):
    grammar, beginnings = HOSTILE[name]
    has_begun, loop_went_on, translate = threading.Event(), threading.Event(), room.translate
    waits: list[bool] = []

    def translate_once_the_loop_went_on(*args):
        has_begun.set()
        waits.append(loop_went_on.wait(10))
        return translate(*args)

    monkeypatch.setattr(room, "translate", translate_once_the_loop_went_on)
    compiling = asyncio.create_task(compiler.compile(grammar))
    assert await asyncio.to_thread(has_begun.wait, 10)
    loop_went_on.set()
    matcher = (await compiling).start()
    assert waits == [True], "the loop stood still while the grammar was compiled"
    found, state = allowed(matcher)
    texts = [tiny_vocabulary().tokenizer.decode_bytes([token_id]).decode() for token_id in found]
    assert {text[0] for text in texts} == set(beginnings)
    assert state is MatchState.MUST_CONTINUE
