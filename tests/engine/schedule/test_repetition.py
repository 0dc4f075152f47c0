"""Repetition ends an output if `repetition_stop` is given, and only then."""

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.outputs import FinishReason
from engine.request import RepetitionStop, Request, SamplingParams
from engine.schedule.repetition import is_repeating
from tests.engine import toy
from tests.engine.driver import Driver, output_of
from tests.engine.toy_engine import CHARS, toy_engine

PREFIX = [11, 12, 13]
NGRAM = [5, 6, 7]


@pytest.fixture
def repeating_model(monkeypatch):
    """Let the toy model generate PREFIX once and then NGRAM for ever."""

    def next_token(token_ids, seed=0):
        number = len(token_ids) - 4  # prompts have four tokens
        return PREFIX[number] if number < len(PREFIX) else NGRAM[(number - len(PREFIX)) % len(NGRAM)]

    monkeypatch.setattr(toy, "next_token", next_token)


@given(
    st.lists(st.integers(0, 1), max_size=30),
    st.integers(0, 30),
    st.integers(1, 5),
    st.integers(2, 5),
)
def test_repetition_matches_its_definition(token_ids, num_prompt_tokens, ngram, times):
    num_output_tokens = max(0, len(token_ids) - num_prompt_tokens)
    output = token_ids[len(token_ids) - num_output_tokens :]
    expected = len(output) >= ngram * times and output[-ngram * times :] == output[-ngram:] * times
    assert is_repeating(array("i", token_ids), num_output_tokens, RepetitionStop(ngram, times)) == expected


@given(
    st.lists(st.sampled_from([0, 1, 256, 65537]), min_size=1, max_size=30)
    | st.lists(st.integers(0, 1), min_size=1, max_size=30),
    st.integers(0, 30),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(2, 4),
)
def test_a_range_of_sizes_matches_any_single_size(token_ids, num_prompt_tokens, size, other_size, times):
    least, most = sorted((size, other_size))
    num_output_tokens = max(0, len(token_ids) - num_prompt_tokens)
    token_ids = array("i", token_ids)
    expected = any(
        is_repeating(token_ids, num_output_tokens, RepetitionStop(ngram, times))
        for ngram in range(least, most + 1)
    )
    assert is_repeating(token_ids, num_output_tokens, RepetitionStop(most, times, least)) == expected


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize(
    ("options", "num_tokens", "reason"),
    [
        ({"repetition_stop": RepetitionStop(3, 2)}, 9, "repetition_stop"),
        ({"repetition_stop": RepetitionStop(3, 4)}, 15, "repetition_stop"),
        ({"repetition_stop": RepetitionStop(6, 2)}, 15, "repetition_stop"),
        ({"repetition_stop": RepetitionStop(3, 2), "min_tokens": 14}, 14, "repetition_stop"),
        ({"repetition_stop": RepetitionStop(3, 2), "stop_token_ids": frozenset({12})}, 2, 12),
        ({"repetition_stop": RepetitionStop(2, 2)}, 20, None),
        ({"repetition_stop": RepetitionStop(9, 2, 1)}, 9, "repetition_stop"),
        ({"repetition_stop": RepetitionStop(9, 2, 4)}, 15, "repetition_stop"),
        ({"repetition_stop": RepetitionStop(5, 2, 4)}, 20, None),
        ({}, 20, None),
    ],
)
def test_repetition_ends_an_output(repeating_model, run_ahead, options, num_tokens, reason):
    driver = Driver.of(run_ahead=run_ahead)
    sequence = driver.add([1, 2, 3, 4], 20, **options)
    driver.run()
    assert output_of(sequence) == (PREFIX + NGRAM * 6)[:num_tokens]
    assert sequence.stop_reason == reason
    assert sequence.finish_reason is (FinishReason.LENGTH if reason is None else FinishReason.STOP)


def test_repetition_at_the_length_limit_finishes_with_stop(repeating_model):
    driver = Driver.of()
    sequence = driver.add([1, 2, 3, 4], 9, repetition_stop=RepetitionStop(3, 2))
    driver.run()
    assert (sequence.finish_reason, sequence.num_output_tokens) == (FinishReason.STOP, 9)


def test_tokens_of_the_prompt_do_not_count(monkeypatch):
    monkeypatch.setattr(toy, "next_token", lambda token_ids, seed=0: 1)
    driver = Driver.of()
    sequence = driver.add([1, 1, 1, 1], 20, repetition_stop=RepetitionStop(1, 3))
    driver.run()
    assert output_of(sequence) == [1, 1, 1]


def test_preempted_samples_end_at_the_same_token(repeating_model, run_ahead):
    driver = Driver.of(num_pages=16, page_size=2, run_ahead=run_ahead, overcommit=4.0, max_num_seqs=4)
    sequences = driver.add_group([1, 2, 3, 4], 4, 24, repetition_stop=RepetitionStop(3, 5))
    driver.run()
    assert driver.scheduler.num_preemptions, "the pool is too large for this test"
    for sequence in sequences:
        assert output_of(sequence) == PREFIX + NGRAM * 5
        assert sequence.stop_reason == "repetition_stop"


async def test_the_text_contains_all_repetitions(repeating_model, run_ahead):
    sampling = SamplingParams(max_tokens=40, repetition_stop=RepetitionStop(3, 3))
    requests = [Request("r", (1, 2, 3, 4), replace(sampling, seed=seed)) for seed in range(3)]
    async with toy_engine(run_ahead=run_ahead) as engine:
        deltas = [await stream.collect() for stream in engine.submit_group(requests)]
    for delta in deltas:
        assert delta.text == "".join(CHARS[token_id] for token_id in PREFIX + NGRAM * 3)
        assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, "repetition_stop")
        assert delta.num_tokens == 12


@pytest.mark.parametrize(
    "stop", [(0, 2), (1, 1), (-1, 5), (2049, 2), (3, 2, 0), (3, 2, 4), (257, 2, 1), (1, 1, 1)]
)
async def test_invalid_values_of_repetition_stop_are_refused(stop):
    sampling = SamplingParams(max_tokens=4, repetition_stop=RepetitionStop(*stop))
    async with toy_engine() as engine:
        with pytest.raises(InvalidRequest, match="repetition_stop"):
            engine.submit(Request("r", (1, 2), sampling))
