"""Control tokens are marked, and stop strings have no effect in reasoning, whatever the tokens' arrival."""

import functools
import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.control_tokens import MARK
from engine.outputs import FinishReason
from engine.request import ReasoningSpan
from engine.text.detokenizer import AddTokens, Decoded, Detokenizer, OpenStream
from engine.text.reasoning import ReasoningTracker
from engine.text.token_bytes import TokenPieces

THINK = ReasoningSpan("<think>", "</think>")


@functools.cache
def tokenizer() -> Tokenizer:
    """One token per byte, and control tokens: <call> is special, <think> is not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken("<call>", special=True), AddedToken("<end>", special=True)])
    built.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    return built


def marks(*texts: str) -> tuple[tuple[int, str], ...]:
    return tuple((tokenizer().token_to_id(text), text) for text in texts)


def encode(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def stream(
    token_ids: list[int],
    *,
    seed: int = 0,
    stop: tuple[str, ...] = (),
    marked: tuple[tuple[int, str], ...] = (),
    span: ReasoningSpan | None = None,
    return_tokens: bool = False,
    most: int = 4,
) -> list[Decoded]:
    """Send tokens through a detokenizer, one to `most` at a time."""
    draw = random.Random(seed)
    detokenizer = Detokenizer(tokenizer(), TokenPieces(tokenizer()))
    detokenizer.process([OpenStream(1, (65,), stop, False, 0, True, return_tokens, marked, span)])
    results, rest = [], list(token_ids)
    while rest:
        size = draw.randint(1, most)
        chunk, rest = rest[:size], rest[size:]
        results += detokenizer.process([AddTokens(1, tuple(chunk), None if rest else FinishReason.LENGTH)])
    return results


def joined(results: list[Decoded]) -> str:
    return "".join(result.delta.text for result in results)


@pytest.mark.parametrize("seed", range(6))
def test_a_control_token_has_a_mark_and_text_that_spells_it_has_none(seed: int) -> None:
    spelled = [token_id for char in "<call>" for token_id in encode(char)]
    token_ids = [*encode("é<call>👋"), *spelled, *encode("<call><end> x"), *encode(MARK)]
    results = stream(token_ids, seed=seed, marked=marks("<call>"))
    assert joined(results) == f"é{MARK}<call>👋<call>{MARK}<call> x"
    assert sum(result.delta.num_tokens for result in results) == len(token_ids)
    assert results[-1].num_output_tokens == len(token_ids)


def test_an_unfinished_character_before_a_control_token_is_shown_as_such() -> None:
    token_ids = [*encode("👋")[:2], *encode("<call>a")]
    assert joined(stream(token_ids, marked=marks("<call>"))) == f"\ufffd{MARK}<call>a"


@pytest.mark.parametrize("seed", range(6))
def test_returned_tokens_are_delivered_with_their_text(seed: int) -> None:
    token_ids = [*encode("é👋")[:-2], *encode("<call>a<think>b")]
    results = stream(token_ids, seed=seed, marked=marks("<call>", "<think>"), return_tokens=True)
    told = [token for result in results for token in result.delta.tokens]
    assert [token.piece.token_id for token in told] == token_ids
    text = joined(results)
    assert text == f"é\ufffd{MARK}<call>a{MARK}<think>b"
    places = {token.piece.data: token.offset for token in told}
    assert places[b"a"] == text.index(f"a{MARK}") and places[b"b"] == len(text) - 1
    assert places[b"<think>"] == text.index(f"{MARK}<think>")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("text", "is_open", "shown", "num_reasoning_tokens"),
    [
        ("<think>a. b</think> c. d", False, "<think>a. b</think> c", 6),
        ("\n<think>a.</think>.", False, "\n<think>a.</think>", 5),
        ("a. b</think>c. d", True, "a. b</think>c", 5),
        ("a. b", True, "a. b", 4),
        ("a. <think>b</think>", False, "a", 0),
        (".<think>", False, "", 0),
        ("<thi. nk", False, "<thi", 0),
        (" . ", False, " ", 0),
    ],
)
@pytest.mark.parametrize("has_marks", [False, True])
def test_stop_strings_have_no_effect_in_reasoning(
    text: str, is_open: bool, shown: str, num_reasoning_tokens: int, has_marks: bool, seed: int
) -> None:
    mark = MARK if has_marks else ""
    results = stream(
        encode(text),
        seed=seed,
        stop=(".",),
        marked=marks("<think>", "</think>") if has_marks else (),
        span=ReasoningSpan(f"{mark}<think>", f"{mark}</think>", is_open),
    )
    expected = shown.replace("<think>", f"{mark}<think>").replace("</think>", f"{mark}</think>")
    assert joined(results) == expected
    assert results[-1].num_reasoning_tokens == num_reasoning_tokens
    stopped = "." in text[len(shown) :]
    assert results[-1].delta.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def test_only_text_that_may_begin_reasoning_waits() -> None:
    """ "bx" holds no "b" of the reasoning back: it leaves before "c" has come."""
    results = stream(encode("<think>abc</think>dbc"), stop=("bx",), span=THINK, most=1)
    texts = [result.delta.text for result in results if result.delta.text]
    assert texts == ["<think>a", "b", "c", "</think>", "d", "bc"]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("<think>a<end>b</think> c<end>d", "<end>", "<think>ab</think> c"),
        (" <end>a", "<end>", " "),
        ("<think>a</think>b<call>c", "<call>", "<think>a</think>b"),
        ("<think>a</think>b</think>c", "</think>", "<think>a</think>b"),
    ],
)
@pytest.mark.parametrize("has_marks", [False, True])
def test_stop_tokens_wait_for_the_end_of_the_reasoning(
    text: str, stop: str, shown: str, has_marks: bool, seed: int
) -> None:
    marked = marks("<think>", "</think>", "<call>") if has_marks else ()
    mark = MARK if has_marks else ""
    span = ReasoningSpan(f"{mark}<think>", f"{mark}</think>")
    results = stream(encode(text), seed=seed, stop=(stop,), marked=marked, span=span)
    assert joined(results).replace(MARK, "") == shown
    last = results[-1].delta
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, stop)


def test_a_tracker_finds_where_the_answer_begins() -> None:
    tracker = ReasoningTracker({}, THINK)
    assert [tracker.advance(text) for text in (" <th", "ink>a</th", "ink")] == [None, None, None]
    assert tracker.is_reasoning
    assert tracker.advance(">bc") == 2
    assert tracker.is_answer
    plain = ReasoningTracker({}, THINK)
    assert plain.advance("<th") is None and plain.is_undecided
    assert plain.advance("e") == 4 and plain.is_answer
