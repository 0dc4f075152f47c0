"""A new kind of constraint is a module with applies() and make() and one entry in KINDS, and nothing else."""

from dataclasses import replace
from itertools import pairwise

import pytest

from engine.constraint import WORD_BITS, MatchState
from engine.constraints import kinds
from engine.constraints.kinds import KINDS, constraints_of
from engine.request import Grammar, SamplingParams
from engine.text.token_bytes import TokenPieces
from tests.engine.tiny_engine import answers, tiny_engine, tiny_request, tiny_tokenizer

PIECES = TokenPieces(tiny_tokenizer())


class NoRepeats:
    """Allows any token but the one before, in outputs that stop at a token of their own."""

    @staticmethod
    def applies(sampling):
        return 7 in sampling.stop_token_ids

    @staticmethod
    def make(sampling, pieces, compiled):
        return NoRepeats()

    def start(self):
        return NoRepeatsMatcher()


class NoRepeatsMatcher:
    problem = ""
    last = None

    @classmethod
    def fill_masks(cls, matchers, new_token_ids, masks):
        for matcher, new, mask in zip(matchers, new_token_ids, masks, strict=True):
            matcher.last = new[-1] if new else matcher.last
            if matcher.last is not None:
                mask.view("uint32")[matcher.last // WORD_BITS] &= (
                    ~(1 << matcher.last % WORD_BITS) & 0xFFFFFFFF
                )
        return [MatchState.MAY_STOP] * len(matchers)


@pytest.fixture
def with_toy(monkeypatch):
    monkeypatch.setattr(kinds, "KINDS", (*KINDS, NoRepeats))


def toy_request(**sampling):
    """A request whose logit bias makes it repeat one token, unless that is forbidden."""
    request = tiny_request(
        "prompt", 12, stop_token_ids=frozenset({7}), logit_bias=((65, 100.0), (66, 50.0)), **sampling
    )
    return replace(request, return_tokens=True)


def ids_of(delta):
    return [token.piece.token_id for token in delta.tokens]


async def test_without_an_entry_nothing_is_restricted():
    async with tiny_engine() as engine:
        [delta] = await answers(engine, [toy_request()])
        assert set(ids_of(delta)) == {65}


async def test_one_entry_restricts_what_the_engine_writes(with_toy, run_ahead):
    async with tiny_engine(run_ahead=run_ahead) as engine:
        [delta] = await answers(engine, [toy_request()])
        ids = ids_of(delta)
        assert len(ids) == 12 and all(one != other for one, other in pairwise(ids))
        assert set(ids) == {65, 66}
        with pytest.raises(ValueError, match="prepare"):
            engine.submit(toy_request())
        [plain] = await engine.prepare([tiny_request("prompt")])
        assert plain.constraints == ()


async def test_requests_with_equal_parameters_share_its_constraint(with_toy):
    async with tiny_engine() as engine:
        one, other, different = await engine.prepare(
            [toy_request(seed=1), toy_request(seed=2), toy_request(temperature=0.5)]
        )
        assert one.constraints[0] is other.constraints[0]
        assert one.constraints[0] is not different.constraints[0]


def test_a_replay_gets_it_too(with_toy):
    sampling = SamplingParams(max_tokens=1, stop_token_ids=frozenset({7}), first_token_ids=frozenset({3}))
    first, toy = constraints_of(sampling, PIECES, None)
    assert isinstance(toy, NoRepeats) and first.token_ids == {3}


async def test_the_grammar_is_the_last_kind(compiler):
    """It allows the opener of reasoning only as far as the masks of the kinds before do."""
    grammar = Grammar("regex", "a")
    sampling = SamplingParams(max_tokens=1, grammar=grammar, bad_words_ids=((1, 2),))
    compiled = await compiler.compile(grammar)
    *_, last = constraints_of(sampling, PIECES, compiled)
    assert last is compiled
