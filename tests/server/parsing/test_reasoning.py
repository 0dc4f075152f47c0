"""Reasoning before the answer, whatever the cut.

Covers server/parsing/reasoning.py, server/parsing/formats/cohere_think.py,
server/parsing/formats/granite_think.py, server/parsing/formats/mistral_think.py,
server/parsing/formats/seed_think.py, server/parsing/formats/think_response.py,
server/parsing/formats/minimax_think.py, server/parsing/formats/gemma4_think.py and
server/parsing/formats/apriel_think.py.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.control_tokens import MARK
from engine.text.reasoning import ReasoningTracker
from server.parsing.events import Event, Message
from server.parsing.formats import reasoning_formats
from server.parsing.formats.think import ThinkParser
from server.parsing.parser import Marker
from server.parsing.reasoning import ReasoningParser

TOKENS = Marker({"<think>": 1, "</think>": 2})


def parse(*pieces: str, is_open: bool = False, marker: Marker | None = None, is_cut: bool = False) -> Message:
    parser: ReasoningParser = ThinkParser(marker or Marker(), is_open=is_open)
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return Message.of([*events, *parser.finish(is_cut=is_cut)])


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nHm. 2 + 2.\n</think>\n\nIt is 4.", False, "Hm. 2 + 2.", "It is 4."),
        ("\n<think>Hm.</think>4", False, "Hm.", "4"),
        ("Hm.\n</think>\n\n4", True, "Hm.", "4"),
        ("<think>\nHm.</think>4", True, "Hm.", "4"),
        ("</think>4", True, "", "4"),
        ("<think>\n\n</think>\n\n4 ", False, "", "4 "),
        ("Use <think> and </think>.", False, "", "Use <think> and </think>."),
        ("  plain ", False, "", "  plain "),
        ("<thin", False, "", "<thin"),
        ("never ends\n", True, "never ends", ""),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("<think>a <think> b</think> c", False, "a <think> b", "c"),
    ],
)
def test_reasoning_comes_first_or_not_at_all(text: str, is_open: bool, reasoning: str, content: str) -> None:
    for place in range(len(text) + 1):
        message = parse(text[:place], text[place:], is_open=is_open)
        assert (message.reasoning, message.content) == (reasoning, content), f"cut at {place}"
    message = parse(*text, is_open=is_open)
    assert (message.reasoning, message.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("name", "text", "is_open", "reasoning", "content"),
    [
        ("mistral", "[THINK]Hm.[/THINK]4", False, "Hm.", "4"),
        ("seed_oss", "\n<seed:think>Hm.</seed:think>4", False, "Hm.", "4"),
        ("cohere", "<|START_THINKING|>Hm.<|END_THINKING|>4", False, "Hm.", "4"),
        ("cohere", "Hm.<|END_THINKING|>4", True, "Hm.", "4"),
        (
            "cohere",
            "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>4<|END_RESPONSE|>",
            False,
            "Hm.",
            "4",
        ),
        ("cohere", " <|START_TEXT|>4 <|END_TEXT|>", False, "", "4"),
        ("cohere", "<|START_ACTION|>4", False, "", "<|START_ACTION|>4"),
        ("minimax_m3", "<mm:think>Hm.</mm:think>4", False, "Hm.", "4"),
        ("minimax_m3", "</mm:think>4", False, "", "4"),
        ("gemma4", "<|channel>thought\nHm.\n<channel|>4", False, "Hm.", "4"),
        ("gemma4", "<|channel>thought\n<channel|>4", False, "", "4"),
        ("gemma4", "<|channel>final\n4", False, "", "<|channel>final\n4"),
        ("apriel", "Hm.\n[BEGIN FINAL RESPONSE]\n4", True, "Hm.", "4"),
        ("apriel", "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\n4", False, "Hm.", "4"),
        ("granite", "Here is my thought process: Hm.\n\nHere is my response: 4", False, "Hm.", "4"),
        ("granite", "Here is my answer: 4", False, "", "Here is my answer: 4"),
        ("think_response", "<think>Hm.</think>\n<response>\n4 < 5\n</response>\n", False, "Hm.", "4 < 5\n"),
        ("think_response", "Hm.</think><answer>4 </answer>and more", True, "Hm.", "4and more"),
        (
            "think_response",
            "<think>Hm.</think>4 <response>5</response>",
            False,
            "Hm.",
            "4 <response>5</response>",
        ),
        ("think_response", "<response>4</response>", False, "", "<response>4</response>"),
        ("think_response", "<think></think><resp", False, "", "<resp"),
        ("think_response", "<think></think><response>4</resp", False, "", "4</resp"),
        ("think", "<think>Hm.</think><answer>4</answer>", False, "Hm.", "<answer>4</answer>"),
    ],
)
def test_every_format_has_its_own_markers(
    name: str, text: str, is_open: bool, reasoning: str, content: str
) -> None:
    for pieces in (*([text[:place], text[place:]] for place in range(len(text) + 1)), list(text)):
        parser = reasoning_formats()[name](Marker(), is_open=is_open)
        events = [event for piece in pieces for event in parser.feed(piece)]
        message = Message.of([*events, *parser.finish()])
        assert (message.reasoning, message.content) == (reasoning, content), pieces


def test_control_tokens_are_not_what_merely_spells_them() -> None:
    text = f"{MARK}<think>It ends with </think>, I think.{MARK}</think>Yes."
    message = parse(*text, marker=TOKENS)
    assert message.reasoning == "It ends with </think>, I think."
    assert message.content == "Yes."
    assert parse("<think>Hm.</think>", marker=TOKENS).content == "<think>Hm.</think>"


WORDS = ["<think>", "</think>", "<th", "ink>", " ", "\n", "a", MARK, f"{MARK}<think>", f"{MARK}</think>"]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(WORDS), max_size=10), st.booleans(), st.booleans())
def test_any_text_joins_to_the_same_and_the_engine_agrees(
    words: list[str], is_open: bool, has_tokens: bool
) -> None:
    text = "".join(words)
    marker = TOKENS if has_tokens else Marker()
    whole = parse(text, is_open=is_open, marker=marker)
    by_character = parse(*text, is_open=is_open, marker=marker)
    assert (by_character.reasoning, by_character.content) == (whole.reasoning, whole.content)
    tracker = ReasoningTracker({}, ThinkParser.span(marker, is_open=is_open))
    for char in text:
        if not tracker.is_answer:
            tracker.advance(char)
    if whole.content.strip():
        assert tracker.is_answer or tracker.is_undecided
    if whole.reasoning and tracker.is_answer:
        assert marker("</think>") in text
