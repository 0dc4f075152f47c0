"""Messages with channels: reasoning, content and calls of gpt-oss.

Covers server/parsing/formats/harmony.py and server/parsing/whole.py.
"""

import json
import re
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from engine.constraints import after_reasoning
from engine.constraints.grammar import Vocabulary, compile_grammar
from engine.control_tokens import MARK
from engine.outputs import FinishReason
from engine.request import Grammar, SamplingParams
from engine.text.reasoning import ReasoningTracker
from server.parsing.events import Message
from server.parsing.formats.harmony import MAX_HEADER_CHARS, HarmonyParser
from server.parsing.parser import Marker, Tools
from server.parsing.tool_call_grammar import forced_call_grammar, framed_answer, json_or_calls
from server.schema.tools import FunctionDefinition
from tests.engine import tiny_engine
from tests.server.parsing.test_cuts import cuts
from tests.server.parsing.test_tool_call_grammar import NOW, WEATHER, Writer
from tests.server.parsing.texts import TOOLS, parse

THOUGHT = "<|channel|>analysis<|message|>Hm. {}<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
MARKERS = HarmonyParser.markers


def say(*pieces: str, tools: Tools = TOOLS, is_cut: bool = False, **options: Any) -> Message:
    return parse(HarmonyParser(tools, Marker(), **options), *pieces, is_cut=is_cut)


def test_analysis_is_reasoning_and_its_messages_are_separated() -> None:
    text = THOUGHT.format(1) + THOUGHT.format(" 2 \n") + FINAL + " 4 "
    for pieces in cuts(text):
        message = say(*pieces)
        assert (message.reasoning, message.content) == ("Hm. 1\n\nHm.  2", " 4 ")
    left_in = say(text, separates_reasoning=False)
    assert (left_in.reasoning, left_in.content) == ("", "Hm. 1\n\nHm.  2\n\n 4 ")


def test_an_answer_that_broke_off_shows_no_part_of_a_header() -> None:
    text = (
        THOUGHT.format(1)
        + '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    pieces = re.findall(rf"{MARK}<\|\w+\|>|.", text.replace("<|", f"{MARK}<|"))
    tokens = Marker(dict.fromkeys(MARKERS, 1))
    for length in range(len(pieces) + 1):
        for is_cut in (True, False):
            message = parse(HarmonyParser(TOOLS, tokens), *pieces[:length], is_cut=is_cut)
            assert message.content == "", pieces[:length]
            assert message.reasoning in "Hm. 1"
            assert all(call.is_complete for call in message.calls) or is_cut
    assert [json.loads(call.arguments) for call in message.calls] == [{"a": 1}]


def test_text_that_spells_control_tokens_is_text() -> None:
    spelled = "The header is <|start|>assistant<|channel|>final<|message|>, then <|end|>."
    tokens = Marker(dict.fromkeys(MARKERS, 1))
    text = f"{MARK}<|channel|>final{MARK}<|message|>{spelled}{MARK}<|return|>"
    for pieces in cuts(text):
        assert parse(HarmonyParser(TOOLS, tokens), *pieces).content == spelled
    call = f'{MARK}<|channel|>commentary to=functions.now{MARK}<|message|>{{"a": "<|call|>"}}{MARK}<|call|>'
    [found] = parse(HarmonyParser(TOOLS, tokens), *call).calls
    assert (json.loads(found.arguments), found.is_complete) == ({"a": "<|call|>"}, True)


def test_a_continued_message_goes_on_as_content() -> None:
    message = say(" and 5.<|return|>", is_continued=True)
    assert message.content == " and 5."


@pytest.mark.parametrize(
    ("header", "is_call"),
    [
        ("commentary to=functions.now", True),
        ("commentary to=functions.now code", True),
        ("analysis to=functions.rm", True),
        ("commentary to=now", True),
        ("analysis to=python code", False),
        ("commentary to=browser.search", False),
        ("final", False),
        ("commentary to=functions.a b", True),
        ("commentary to=functions.", False),
    ],
)
def test_functions_and_tools_of_the_request_are_called(header: str, is_call: bool) -> None:
    message = say(f'<|channel|>{header}<|message|>{{"a": 1}}<|call|>')
    assert bool(message.calls) is is_call
    is_reasoning = header.startswith("analysis")
    texts = (message.reasoning, message.content)
    assert texts == (("", "") if is_call else ('{"a": 1}', "")[:: 1 if is_reasoning else -1])


def test_tools_that_are_not_allowed_are_content() -> None:
    text = '<|channel|>commentary to=functions.now<|message|>{"a": 1}<|call|>'
    for tools in (Tools({}, only=()), Tools(TOOLS.parameters, only=frozenset({"get_weather"}))):
        message = say(text, tools=tools)
        assert (message.calls, message.content) == ([], '{"a": 1}')


def test_a_message_of_another_role_ends_the_answer() -> None:
    parser = HarmonyParser(TOOLS, Marker())
    text = f"{FINAL}Done.<|end|><|start|>user<|message|>Go on.{FINAL}No."
    assert parse(parser, *text).content == "Done."
    assert parser.is_full


def test_a_header_of_any_length_is_read_in_linear_time() -> None:
    long = "<|channel|>" + "x" * MAX_HEADER_CHARS + "y<|message|>z"
    assert say(*long).content == say(long).content == long.replace("<|message|>", "")
    for text in (
        "<|channel|>" * 30_000,
        "<|start|>" * 30_000,
        THOUGHT * 5000,
        (FINAL + "<|end|>") * 10_000,
    ):
        pieces = [text[start : start + 7] for start in range(0, len(text), 7)]
        assert say(*pieces).calls == []


def test_the_engine_finds_the_reasoning() -> None:
    marker = Marker(dict.fromkeys(MARKERS, 1))
    tracker = ReasoningTracker({}, HarmonyParser.span(marker))
    text = (THOUGHT + FINAL).replace("<|", f"{MARK}<|")
    at = text.index(f"{MARK}<|start|>")
    for place, char in enumerate(text):
        if not tracker.is_answer:
            tracker.advance(char)
        assert tracker.is_answer == (place >= at - 1)


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (Grammar("json_object"), '{"a": 1}', "a"),
        (Grammar("json_schema", '{"enum": [1, "a"]}'), '"a"', "2"),
        (Grammar("regex", "[0-9]+x"), "12x", "x"),
        (Grammar("choice", '["yes", "no"]'), "no", "maybe"),
        (Grammar("ebnf", 'root ::= "a" b\nb ::= [0-9]'), "a1", "b1"),
        (Grammar("ebnf", 'start: "a" b\nb: "c"'), "ac", "a"),
        (Grammar("lark", 'start: "a" calls\ncalls: "c"'), "ac", "a"),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
def test_what_the_answer_may_be_applies_to_the_final_channel(asked: Grammar, good: str, bad: str) -> None:
    writer = Writer(MARKERS)
    rules = HarmonyParser.call_rules(writer.tokens)
    assert rules is not None
    grammar = framed_answer(asked, rules)
    for thoughts in ("", THOUGHT, THOUGHT + THOUGHT.format("é\n<b>")):
        assert writer.is_allowed(grammar, thoughts + FINAL + good)
        assert not writer.is_allowed(grammar, thoughts + FINAL + bad)
    assert not writer.is_allowed(grammar, good)
    assert not writer.is_allowed(grammar, "<|channel|>commentary<|message|>" + good)
    assert not writer.is_allowed(grammar, "<|channel|>analysis<|message|>Hm.")


def test_a_call_may_take_the_place_of_json_after_a_thought() -> None:
    writer = Writer(MARKERS)
    rules = HarmonyParser.call_rules(writer.tokens)
    assert rules is not None
    tool = FunctionDefinition(name="f", parameters={"properties": {"a": {"type": "integer"}}})
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
    either = json_or_calls(Grammar("json_object"), rules, [tool], is_one=False)
    forced = forced_call_grammar(rules, [tool], is_one=False)
    assert writer.is_allowed(either, THOUGHT + call) and writer.is_allowed(either, THOUGHT + FINAL + "{}")
    assert writer.is_allowed(forced, THOUGHT + call) and not writer.is_allowed(forced, THOUGHT + FINAL + "{}")
    assert not writer.is_allowed(forced, call.replace("1", '"x"'))
    assert not writer.is_allowed(forced, call.replace("functions.f", "functions.g"))


def test_a_grammar_that_describes_the_reasoning_applies_from_the_first_token() -> None:
    writer = Writer(MARKERS)
    rules = HarmonyParser.call_rules(writer.tokens)
    assert rules is not None
    span = HarmonyParser.span(Marker(writer.tokens))
    for grammar, is_whole in (
        (Grammar("json_object"), False),
        (framed_answer(Grammar("json_object"), rules), True),
    ):
        compiled = compile_grammar(grammar, writer.vocabulary)
        sampling = SamplingParams(1, grammar=grammar, reasoning=span)
        made = after_reasoning.make(sampling, None, compiled)  # type: ignore[arg-type]
        assert (made is compiled) is is_whole


async def test_a_model_of_random_weights_reasons_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control tokens of the engine's tokenizer reach the parser, and the grammar runs on its device."""
    backend = Tokenizer.from_str(tiny_engine.tiny_tokenizer().to_str())
    backend.add_special_tokens([AddedToken(text, special=True) for text in MARKERS])
    tokens = {text: backend.token_to_id(text) for text in MARKERS}
    vocabulary = Vocabulary(backend, (tiny_engine.EOS,))
    monkeypatch.setattr(tiny_engine, "tiny_tokenizer", lambda: backend)
    monkeypatch.setattr(tiny_engine, "tiny_vocabulary", lambda has_eos: vocabulary)
    rules, marker = HarmonyParser.call_rules(tokens), Marker(tokens)
    assert rules is not None
    sampling: dict[str, Any] = {
        "marks": tuple((token_id, text) for text, token_id in tokens.items()),
        "reasoning": HarmonyParser.span(marker),
        "logit_bias": ((tokens["<|end|>"], 6.0),),  # random weights reason on and on
    }
    grammars = (
        forced_call_grammar(rules, [WEATHER, NOW], is_one=False),
        framed_answer(Grammar("json_schema", '{"enum": ["<|end|>", 1]}'), rules),
    )
    has_reasoned = False
    async with tiny_engine.tiny_engine() as engine:
        for grammar in grammars:
            requests = [
                tiny_engine.tiny_request("hi", seed=seed, grammar=grammar, **sampling) for seed in range(6)
            ]
            for delta in await tiny_engine.answers(engine, requests):
                assert delta.finish_reason is FinishReason.STOP, delta
                message = parse(HarmonyParser(Tools({}), marker), delta.text)
                has_reasoned = has_reasoned or f"{MARK}<|end|>" in delta.text
                if grammar is grammars[0]:
                    [call] = message.calls
                    assert call.name in (WEATHER.name, NOW.name) and not message.content
                    assert isinstance(json.loads(call.arguments), dict)
                else:
                    assert json.loads(message.content) in ("<|end|>", 1) and not message.calls
    assert has_reasoned
