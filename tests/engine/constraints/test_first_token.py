"""The first token of an output is one of a set; later tokens are free."""

from dataclasses import replace

import pytest

from engine.constraint import MatchState
from engine.constraints.first_token import FirstToken
from engine.constraints.kinds import is_constrained
from engine.errors import InvalidRequest
from engine.outputs import FinishReason
from engine.request import Grammar, SamplingParams
from tests.engine.tiny_engine import EOS, NUM_WORDS, VOCAB_SIZE, allowed, answers, tiny_engine, tiny_request

FIRST = frozenset({65, 200, VOCAB_SIZE - 1})


def test_only_the_first_token_is_restricted():
    constraint = FirstToken(FIRST)
    matcher = constraint.start()
    assert allowed(matcher) == (FIRST, MatchState.MUST_CONTINUE)
    everything = set(range(NUM_WORDS * 32))
    assert allowed(matcher, 65) == (everything, MatchState.DONE)
    assert allowed(constraint.start(), 65, 66) == (everything, MatchState.DONE), "as after a preemption"
    assert not is_constrained(SamplingParams(max_tokens=1))


async def test_outputs_begin_with_an_allowed_token(run_ahead):
    async with tiny_engine(run_ahead=run_ahead) as engine:
        requests = [
            replace(
                tiny_request("Say:", 12, seed=seed, temperature=3.0, ignore_eos=True, first_token_ids=FIRST),
                return_tokens=True,
            )
            for seed in range(6)
        ]
        requests.append(replace(tiny_request("Say:", 12, ignore_eos=True), return_tokens=True))
        deltas = await answers(engine, requests)
        group = engine.submit_group(await engine.prepare(requests[:3]))
        together = [await stream.collect() for stream in group]
    for delta in deltas[:-1]:
        ids = [token.piece.token_id for token in delta.tokens]
        assert len(ids) == 12
        assert ids[0] in FIRST
        assert not set(ids[1:]) <= FIRST
    assert [delta.text for delta in together] == [delta.text for delta in deltas[:3]]


async def test_the_first_token_may_be_eos():
    async with tiny_engine() as engine:
        [delta] = await answers(engine, [tiny_request("a", 9, first_token_ids=frozenset({EOS}))])
    assert (delta.text, delta.num_tokens, delta.finish_reason) == ("", 1, FinishReason.STOP)


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": frozenset({7})},
        {"bad_words_ids": ((5,),)},
        {"stop_token_ids": frozenset({5}), "min_tokens": 1},
        {"grammar": Grammar("json_object")},
        {"token_healing": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_a_first_token_without_a_choice_is_refused(fields):
    async with tiny_engine() as engine:
        request = tiny_request("a", first_token_ids=frozenset({5}), **fields)
        with pytest.raises(InvalidRequest, match="first_token_ids"):
            await engine.prepare([request])


async def test_ids_out_of_range_and_unprepared_requests_are_refused():
    async with tiny_engine() as engine:
        with pytest.raises(InvalidRequest, match="first_token_ids"):
            engine.submit(tiny_request("a", first_token_ids=frozenset({VOCAB_SIZE})))
        with pytest.raises(ValueError, match="prepare"):
            engine.submit(tiny_request("a", first_token_ids=frozenset({5})))
