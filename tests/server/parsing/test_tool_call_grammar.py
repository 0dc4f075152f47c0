"""Grammars of forced calls: the parser of the format finds the calls in any text they allow."""

import json
import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from engine.constraints.grammar import Vocabulary, compile_grammar
from engine.control_tokens import MARK
from engine.outputs import FinishReason
from engine.request import Grammar
from server.parsing.answer_format import grammar_format
from server.parsing.events import Message
from server.parsing.formats import tool_formats
from server.parsing.parser import Marker, Tools
from server.parsing.tool_call_grammar import CallRules, forced_call_grammar, json_or_calls
from server.schema.tools import FunctionDefinition
from tests.engine.tiny_engine import EOS, answers, tiny_engine, tiny_request, tiny_tokenizer

CITIES = ["Paris", 'a "b" \n; }]', "日本"]
WEATHER = FunctionDefinition(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
NOW = FunctionDefinition(name="ns.now-1")
FORMATS: list[tuple[str, tuple[str, ...]]] = [
    ("harmony", ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")),
    ("cohere", ("<|START_ACTION|>", "<|END_ACTION|>")),
    ("deepseek_v3", ()),
    (
        "deepseek_v3",
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
    ),
    ("glm45", ()),
    ("glm45", ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ()),
    ("hermes", ("<tool_call>", "</tool_call>")),
    ("llama3_json", ("<|python_tag|>",)),
    ("internlm", ("<|action_start|>", "<|plugin|>", "<|action_end|>")),
    ("kimi_k2", ("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>")),
    ("minimax", ()),
    ("minimax_m2", ("<minimax:tool_call>", "</minimax:tool_call>")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    ("phi4_mini", ("<|tool_call|>", "<|/tool_call|>")),
    ("qwen3_coder", ("<tool_call>", "</tool_call>")),
    ("seed_oss", ()),
]


def rules_of(name: str, tokens: Mapping[str, int] = MappingProxyType({})) -> CallRules:
    """Return the rules of a format that has some."""
    rules = tool_formats()[name].call_rules(tokens)
    assert rules is not None
    return rules


class Writer:
    """Writes what a grammar allows, at random, with control tokens in its vocabulary."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        backend = Tokenizer.from_str(tiny_tokenizer().to_str())
        backend.add_special_tokens([AddedToken(text) for text in markers])
        self.tokens: dict[str, int] = {text: backend.token_to_id(text) for text in markers}
        self.vocabulary = Vocabulary(backend, (EOS,))
        self._backend = backend

    def is_allowed(self, grammar: Grammar, text: str) -> bool:
        """Return True if the text may be a whole output."""
        matcher = compile_grammar(grammar, self.vocabulary).new_matcher()
        return matcher.consume_tokens(self._backend.encode(text).ids) and matcher.is_accepting()

    def write(self, grammar: Grammar, seed: int, max_tokens: int = 600) -> str | None:
        """Return the text as the engine delivers it; None if it did not end."""
        draw = random.Random(seed)
        matcher = compile_grammar(grammar, self.vocabulary).new_matcher()
        names = {token_id: text for text, token_id in self.tokens.items()}
        said = b""
        for _ in range(max_tokens):
            bits = np.unpackbits(self.vocabulary.masks([matcher]).view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            if not allowed or (EOS in allowed and draw.random() < 0.5):
                return said.decode()
            markers = [found for found in allowed if found in names]
            if markers and draw.random() < 0.3:  # they end texts that may have any length
                allowed = markers
            token_id = draw.choice([found for found in allowed if found != EOS] or [EOS])
            if token_id == EOS:
                return said.decode()
            matcher.consume_tokens([token_id])
            assert not matcher.is_error(), matcher.get_error()
            name = names.get(token_id)
            data = self.vocabulary.tokenizer.decode_bytes([token_id])
            said += f"{MARK}{name}".encode() if name else data
        return None


@pytest.mark.parametrize(("written", "markers"), FORMATS)
@pytest.mark.parametrize("is_one", [False, True])
def test_what_a_grammar_allows_is_parsed_as_calls(
    written: str, markers: tuple[str, ...], is_one: bool
) -> None:
    writer = Writer(markers)
    rules = rules_of(written, writer.tokens)
    grammar = forced_call_grammar(rules, [WEATHER, NOW], is_one=is_one)
    tools = Tools({"get_weather": WEATHER.parameters or {}, "ns.now-1": {}}, parallel=not is_one)
    found: set[tuple[str, ...]] = set()
    for seed in range(12):
        text = writer.write(grammar, seed)
        assert text is not None, "the arguments are short"
        parser = tool_formats()[written](tools, Marker(writer.tokens))
        message = Message.of([*parser.feed(text), *parser.finish()])
        assert message.content == "", text
        assert message.calls and all(call.is_complete for call in message.calls), text
        for call in message.calls:
            arguments = json.loads(call.arguments)
            if call.name == "ns.now-1":
                assert arguments == {}
            else:
                assert arguments.pop("city") in CITIES
                assert 0 <= arguments.pop("days", 0) <= 99 and not arguments
        found.add(tuple(call.name for call in message.calls))
    assert {("get_weather",), ("ns.now-1",)} <= {names[:1] for names in found}
    assert (is_one or rules.separator is None) == all(len(names) == 1 for names in found), (
        "several calls where they may be"
    )


@pytest.mark.parametrize(("written", "markers"), FORMATS)
@pytest.mark.parametrize("whitespace", [None, ""])
def test_calls_may_stand_in_place_of_json(
    written: str, markers: tuple[str, ...], whitespace: str | None
) -> None:
    writer = Writer(markers)
    person = {
        "type": "object",
        "properties": {"name": {"$ref": "#/$defs/Name"}, "parameters": {"type": "integer", "maximum": 9}},
        "required": ["name"],
        "additionalProperties": False,
        "$defs": {"Name": {"type": "string", "maxLength": 3}},
    }
    asked = Grammar("json_schema", json.dumps(person), whitespace)
    tool = FunctionDefinition(
        name="f",
        parameters={
            "type": "object",
            "properties": {"to": {"$ref": "#/$defs/City"}},
            "required": ["to"],
            "additionalProperties": False,
            "$defs": {"City": {"enum": ["Rome", "Oslo"]}},
        },
    )
    rules = rules_of(written, writer.tokens)
    grammar = json_or_calls(asked, rules, [tool], is_one=True)
    called = '{"name": "f", "parameters": {"to": "Oslo"}}'
    if written != "llama3_json":  # whose calls no marker begins: what is drawn at random is none
        kinds = set()
        for seed in range(20):
            text = writer.write(grammar, seed)
            if text is None:
                continue
            parser = tool_formats()[written](Tools({"f": {}}, parallel=False), Marker(writer.tokens))
            message = Message.of([*parser.feed(text), *parser.finish()])
            if message.calls:
                assert json.loads(message.calls[0].arguments)["to"] in ("Rome", "Oslo"), text
                assert not message.content, text
            else:
                assert len(json.loads(message.content)["name"]) <= 3, text
            kinds.add(bool(message.calls))
        assert kinds == {False, True}, "an answer may be either"
    elif whitespace is None:
        assert writer.is_allowed(grammar, called)
        assert not writer.is_allowed(grammar, called.replace("Oslo", "Graz"))
    else:
        assert writer.is_allowed(grammar, called.replace(" ", ""))
    header = "<|channel|>final<|message|>" if rules.frame else ""
    answer = header + '{"name":"f"}'
    assert writer.is_allowed(grammar, answer)
    assert writer.is_allowed(grammar, answer.replace(":", ":\n  ")) == (whitespace is None)
    assert not writer.is_allowed(grammar, answer.replace('"f"', '"long"'))


async def test_a_model_of_random_weights_makes_the_calls() -> None:
    grammar = forced_call_grammar(rules_of("hermes"), [WEATHER, NOW], is_one=True)
    async with tiny_engine() as engine:
        found = await answers(engine, [tiny_request("hi", seed=seed, grammar=grammar) for seed in range(4)])
    for delta in found:
        assert delta.finish_reason is FinishReason.STOP, delta
        parser = tool_formats()["hermes"](Tools({"get_weather": {}, "ns.now-1": {}}), Marker())
        message = Message.of([*parser.feed(delta.text), *parser.finish()])
        assert len(message.calls) == 1 and not message.content, delta.text
        assert isinstance(json.loads(message.calls[0].arguments), dict)


def test_only_a_strict_schema_must_be_one_that_can_be_obeyed() -> None:
    vocabulary = Writer(()).vocabulary
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for strict in (None, False):
        tool = FunctionDefinition(name="f", parameters=schema, strict=strict)
        compile_grammar(forced_call_grammar(rules_of("hermes"), [tool], is_one=True), vocabulary)
    tool = FunctionDefinition(name="f", parameters=schema, strict=True)
    with pytest.raises(ValueError, match="uniqueItems"):
        compile_grammar(forced_call_grammar(rules_of("hermes"), [tool], is_one=True), vocabulary)


ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)


@pytest.mark.parametrize(
    "value",
    [{"type": "string", "pattern": "(?=a)b"}, {"$ref": "https://example.com/s.json"}, {"multipleOf": 99_991}],
    ids=str,
)
def test_what_no_grammar_can_see_to_is_left_out_unless_the_tool_is_strict(value: dict[str, Any]) -> None:
    vocabulary = Writer(()).vocabulary
    schema = {"type": "object", "properties": {"a": value}, "required": ["a"], "additionalProperties": False}
    for strict, asked in ((False, None), (None, Grammar("json_object")), (True, None)):
        tool = FunctionDefinition(name="f", parameters=schema, strict=strict)
        grammar = forced_call_grammar(rules_of("hermes"), [tool], is_one=True)
        if asked is not None:
            grammar = json_or_calls(asked, rules_of("llama3_json"), [tool], is_one=True)
        if strict:
            with pytest.raises(ValueError, match=r"\w") as caught:
                compile_grammar(grammar, vocabulary)
            assert "tool_call" not in str(caught.value), "only what the client has written is shown"
        else:
            compile_grammar(grammar, vocabulary)


def test_patterns_that_libraries_write_are_obeyed_by_strict_tools_too() -> None:
    schema = {"type": "object", "properties": {"to": {"type": "string", "pattern": ZOD_EMAIL}}}
    tool = FunctionDefinition(name="mail", parameters=schema, strict=True)
    compile_grammar(forced_call_grammar(rules_of("hermes"), [tool], is_one=True), Writer(()).vocabulary)


def test_formats_without_a_grammar_are_written_as_hermes() -> None:
    assert grammar_format("mistral", {})[0] == "mistral"
    for own in ("pythonic", "deepseek_v32", "response_template", None):
        assert grammar_format(own, {})[0] == "hermes"


@pytest.mark.parametrize("schema", [{"const": "<|end｜>"}, {"type": "string", "pattern": r"^<\|end｜>$"}])
def test_a_schema_that_spells_a_control_token_is_followed_in_plain_text(schema: dict[str, Any]) -> None:
    writer = Writer(("<tool_call>", "</tool_call>", "<|end｜>"))
    parameters = {
        "type": "object",
        "properties": {"a": schema},
        "required": ["a"],
        "additionalProperties": False,
    }
    tool = FunctionDefinition(name="f", parameters=parameters)
    text = writer.write(forced_call_grammar(rules_of("hermes", writer.tokens), [tool], is_one=True), seed=0)
    assert text is not None and "<|end｜>" in text and f"{MARK}<|end｜>" not in text
