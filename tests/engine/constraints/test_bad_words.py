"""Bad words never appear in an output, whatever a model of random weights prefers."""

from dataclasses import replace

import pytest

from engine.constraint import MatchState
from engine.constraints.bad_words import BadWords, spellings
from engine.constraints.kinds import constraints_of, is_constrained
from engine.errors import InvalidRequest
from engine.outputs import FinishReason
from engine.request import SamplingParams
from engine.text.token_bytes import TokenPieces
from tests.engine.tiny_engine import (
    NUM_WORDS,
    VOCAB_SIZE,
    allowed,
    answers,
    tiny_engine,
    tiny_request,
    tiny_tokenizer,
)

A, B, C = 65, 66, 67
BAD = ((A, B), (C,), (B, B, A))


def banned(matcher, *token_ids: int) -> set[int]:
    """What may not follow, once these tokens have come, too."""
    others, state = allowed(matcher, *token_ids)
    assert state is MatchState.MAY_STOP
    return set(range(NUM_WORDS * 32)) - others


def test_the_last_token_of_a_word_is_banned_after_its_other_tokens():
    sampling = SamplingParams(max_tokens=1, bad_words_ids=((1, 2, 31), (2, 40), (7,), (9, 9)))
    [constraint] = constraints_of(sampling, TokenPieces(tiny_tokenizer()), None)
    assert constraint == BadWords(((1, 2, 31), (2, 40), (9, 9)))
    matcher = constraint.start()
    assert banned(matcher) == set()
    assert banned(matcher, 1) == set()
    assert banned(matcher, 2) == {31, 40}
    assert banned(matcher, 2) == {40}
    assert banned(matcher, 9) == {9}
    assert banned(matcher, 5, 1, 2) == {31, 40}, "several tokens at once, as after a preemption"
    other = constraint.start()
    assert banned(other) == set(), "every continuation is followed by itself"


def test_words_of_one_token_need_no_constraint():
    assert not is_constrained(SamplingParams(max_tokens=1, bad_words_ids=((7,),)))


async def test_words_are_spelled_with_and_without_a_leading_space():
    async def encode(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tiny_tokenizer().encode_batch(texts, add_special_tokens=False)]

    [null] = await encode(["null"])
    assert await spellings(["null"], encode) == [tuple(null)], "with a space it is one token more"

    async def words(texts: list[str]) -> list[list[int]]:
        return [[len(text)] for text in texts]

    assert len(await spellings(["bad", " bad"], words)) == 2, "both spellings, once each"

    async def pieces(texts: list[str]) -> list[list[int]]:
        return [[1] if text == " exaggerated" else [2, 3, 4] for text in texts]

    assert await spellings(["exaggerated"], pieces) == [(2, 3, 4), (1,)], "of any number of tokens"


async def test_random_models_never_write_a_bad_word(run_ahead):
    async with tiny_engine(run_ahead=run_ahead) as engine:
        requests = [
            replace(
                tiny_request(
                    "Say:",
                    50,
                    seed=seed,
                    temperature=3.0,
                    ignore_eos=True,
                    allowed_token_ids=frozenset((A, B, C)),
                    bad_words_ids=BAD if seed % 2 else (),
                ),
                return_tokens=True,
            )
            for seed in range(8)
        ]
        deltas = await answers(engine, requests)
    for seed, delta in enumerate(deltas):
        ids = [token.piece.token_id for token in delta.tokens]
        assert (len(ids), delta.finish_reason) == (50, FinishReason.LENGTH)
        text = "".join(map(chr, ids))
        assert set(text) <= set("ABC")
        found = [word for word in ("AB", "C", "BBA") if word in text]
        assert bool(found) == (seed % 2 == 0), f"{found} in {text}"


async def test_ids_out_of_range_and_unprepared_words_are_refused():
    async with tiny_engine() as engine:
        with pytest.raises(InvalidRequest, match="bad_words_ids"):
            engine.submit(tiny_request("a", bad_words_ids=((VOCAB_SIZE,),)))
        for fields in ({"bad_words": ("x",)}, {"bad_words_ids": ((1, 2),)}):
            with pytest.raises(ValueError, match="prepare"):
                engine.submit(tiny_request("a", **fields))
