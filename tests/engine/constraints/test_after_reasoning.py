"""A grammar restricts the answer and not the reasoning before it."""

import re

import pytest

from engine.control_tokens import MARK
from engine.outputs import FinishReason
from engine.request import Grammar, ReasoningSpan
from tests.engine.tiny_engine import answers, tiny_engine, tiny_request, tiny_tokenizer

# Two tokens of the vocabulary play the markers.
OPEN, CLOSE = "q", "z"
MARKS = tuple((tiny_tokenizer().token_to_id(text), text) for text in (OPEN, CLOSE))
DIGITS = Grammar("regex", "[0-9]{5}")


def thinking(*, is_open: bool, seed: int = 1, marked: bool = True, bias: tuple = (), **options):
    mark = MARK if marked else ""
    span = ReasoningSpan(mark + OPEN, mark + CLOSE, is_open)
    marks = MARKS if marked else ()
    likely = tuple((tiny_tokenizer().token_to_id(text), by) for text, by in bias)
    options |= {"marks": marks, "reasoning": span, "grammar": DIGITS, "logit_bias": likely}
    return tiny_request("prompt", seed=seed, **options)


@pytest.mark.parametrize("marked", [True, False], ids=["token", "text"])
async def test_reasoning_opened_by_the_prompt_is_unrestricted(run_ahead, marked):
    async with tiny_engine(run_ahead=run_ahead) as engine:
        requests = [
            thinking(is_open=True, seed=seed, marked=marked, bias=((CLOSE, 3.0),), max_tokens=300)
            for seed in range(4)
        ]
        for delta in await answers(engine, requests):
            assert delta.finish_reason is FinishReason.STOP
            thought, _, answer = delta.text.replace(MARK, "").partition(CLOSE)
            assert re.fullmatch("[0-9]{5}", answer), delta.text
            assert len(thought) < 290


async def test_reasoning_opened_by_the_model_is_unrestricted(run_ahead):
    async with tiny_engine(run_ahead=run_ahead) as engine:
        [eager] = await answers(
            engine, [thinking(is_open=False, bias=((OPEN, 100.0), (CLOSE, 97.0)), max_tokens=300)]
        )
        assert re.fullmatch(f"{OPEN}.*{CLOSE}[0-9]{{5}}", eager.text.replace(MARK, ""), re.DOTALL), eager.text
        [silent] = await answers(engine, [thinking(is_open=False, bias=((OPEN, -100.0),))])
        assert re.fullmatch("[0-9]{5}", silent.text)
        [other] = await answers(engine, [thinking(is_open=False, marked=False, bias=((OPEN, 100.0),))])
        assert re.fullmatch("[0-9]{5}", other.text), "an opener of several tokens only the prompt writes"


async def test_unfinished_reasoning_ends_at_max_tokens(run_ahead):
    async with tiny_engine(run_ahead=run_ahead) as engine:
        [delta] = await answers(engine, [thinking(is_open=True, bias=((CLOSE, -100.0),), max_tokens=30)])
        assert delta.finish_reason is FinishReason.LENGTH
