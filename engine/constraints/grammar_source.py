"""Translates the grammars of requests into the language of llguidance 1.9.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md,
https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.constraints import schema_rewrite
from engine.constraints.schema_cost import MAX_TOGETHER
from engine.request import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_SOURCE_CHARS = 262_144
MAX_EBNF_CHARS = 32_768  # its translation to Lark is Python code that holds the GIL
MAX_CHOICES = 4096

GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
GBNF_TEXT = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]', re.DOTALL)
GBNF_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
# In Lark: a string, a regular expression, a comment, and the name of a token.
LITERAL = r"""\"(?:\\.|[^"\\\n])*\"|/(?![/*])(?:\\.|[^/\\\n])+/|//[^\n]*"""
LITERALS = re.compile(LITERAL)
LITERAL_OR_JSON = re.compile(rf"{LITERAL}|(%json\s*)")
LITERAL_OR_TOKEN = re.compile(rf"{LITERAL}|(<[^<>\s\"/]+>)")
# Characters that must be escaped in a string of Lark.
CONTROL = re.compile("[\x7f-\x9f]")


def translate(grammar: Grammar, control_tokens: Mapping[str, int]) -> str:
    """Return a grammar as llguidance reads it. Raises ValueError or RecursionError for an invalid source.

    `control_tokens`: ids by name, for grammars that name control tokens.
    """
    kind, source = grammar.kind, grammar.source
    limit = MAX_EBNF_CHARS if kind == "ebnf" else MAX_SOURCE_CHARS
    if len(source) > limit:
        raise ValueError(f"it has {len(source)} characters; at most {limit} are allowed")
    if "\0" in source:
        raise ValueError("it contains a NUL character")
    closes = grammar.closes_objects is not False
    if grammar.around and kind not in ("json_object", "json_schema"):
        own = translate(replace(grammar, around=""), control_tokens)
        named = json.loads(own)["grammars"][0] if kind == "regex" else {"lark_grammar": own}
        rules = f"{_rewritten_rules(grammar.around, closes_objects=closes)}\nanswer: @own"
        return json.dumps({"grammars": [{"lark_grammar": rules}, {**named, "name": "own"}]})
    if kind == "regex":
        if (len(source) - len(source.rstrip("\\"))) % 2:  # llguidance would ignore it
            raise ValueError("a backslash at its end escapes nothing")
        return LLMatcher.grammar_from_regex(source)
    if kind == "lark":
        return LLMatcher.grammar_from_lark(_rewritten_rules(source, closes_objects=closes))
    if kind == "ebnf":
        rules = _rewritten_rules(_lark(source, control_tokens), closes_objects=False)
        return LLMatcher.grammar_from_lark(rules)
    if kind == "choice":
        return LLMatcher.grammar_from_lark(_choice(source))
    schema: dict[str, Any] = {"type": "object"}
    if kind != "json_object":
        schema = schema_rewrite.ready(schema_rewrite.load(source), closes_objects=closes)
    options = {"lenient": False, **grammar.json_options}
    if grammar.around:
        answer = json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
        rules = _rewritten_rules(grammar.around, closes_objects=closes)
        return LLMatcher.grammar_from_lark(f"{rules}\nanswer: %json {answer}")
    return LLMatcher.grammar_from_json_schema(schema, overrides=cast("JsonCompileOptions", options))


def _lark(source: str, control_tokens: Mapping[str, int]) -> str:
    """Return a client's grammar, in GBNF or in Lark, as Lark."""
    if GBNF_RULE.search(source):
        try:
            return str(gbnf_to_lark(GBNF_TEXT.sub(_unescaped, source)))
        except RecursionError:
            raise
        except Exception as error:  # a parser in Python: it may raise any exception for its input
            raise ValueError(str(error) or type(error).__name__) from error
    if LITERALS.sub("", source).count("&") >= MAX_TOGETHER:
        raise ValueError(f"more than {MAX_TOGETHER} expressions must match the same text")

    def by_id(found: re.Match[str]) -> str:
        token_id = control_tokens.get(found[1])
        return found[0] if token_id is None else f"<[{token_id}]>"

    return LITERAL_OR_TOKEN.sub(by_id, source)


def _unescaped(text: re.Match[str]) -> str:
    """Return a string or class of GBNF without characters by number: the translation loses their zeros."""
    is_class = text[0].startswith("[")

    def character(found: re.Match[str]) -> str:
        number = int(found[1] or found[2] or found[3] or "110000", 16)
        if number > 0x10FFFF:
            return found[0]
        if chr(number) in ("\\[]" if is_class else '"\\'):
            return "\\" + chr(number)
        if number < 0xA0 and (not chr(number).isprintable() or (is_class and chr(number) in "^-")):
            return f"\\x{number:02x}"
        return chr(number)

    return GBNF_ESCAPE.sub(character, text[0])


def _rewritten_rules(rules: str, *, closes_objects: bool) -> str:
    """Return rules in Lark with their JSON schemas rewritten. Raises ValueError."""
    parts, end = [], 0
    while found := LITERAL_OR_JSON.search(rules, end):
        parts.append(rules[end : found.end()])
        end = found.end()
        if found[1] is None:
            continue
        try:
            schema, new_end = json.JSONDecoder().raw_decode(rules, end)
        except ValueError:
            continue  # not a schema, or one that llguidance cannot read
        if isinstance(schema, dict):
            parts.append(json.dumps(_ready(schema, closes_objects=closes_objects), ensure_ascii=False))
            end = new_end
    return "".join((*parts, rules[end:]))


def _ready(schema: dict[str, Any], *, closes_objects: bool) -> dict[str, Any]:
    options = schema.get("x-guidance")
    if not isinstance(options, dict) or not options.get("lenient"):
        return schema_rewrite.ready(schema, closes_objects=closes_objects)
    found = schema_rewrite.ready_leniently(schema, _is_pattern, closes_objects=closes_objects)
    if not _is_accepted(found):  # for example two expressions that it cannot compare
        found = schema_rewrite.without_patterns(found)
    return found


def _is_pattern(text: str) -> bool:
    """Return True if llguidance accepts an expression as the pattern of a string."""
    return _is_accepted({"type": "string", "pattern": text})


def _is_accepted(schema: dict[str, Any]) -> bool:
    """Return True if llguidance accepts a schema."""
    grammar = LLMatcher.grammar_from_json_schema(schema)
    return not LLMatcher(schema_rewrite.byte_tokenizer(), grammar, log_level=0).is_error()


def _choice(source: str) -> str:
    choices = json.loads(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) for text in choices):
        raise ValueError("choices must be a list of strings, at least one")
    if len(choices) > MAX_CHOICES:
        raise ValueError(f"there are {len(choices)} choices; at most {MAX_CHOICES} are allowed")
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    texts = CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", texts)
    return f"start: CHOICE\nCHOICE: {texts}"  # one terminal, which stays cheap with thousands of texts
