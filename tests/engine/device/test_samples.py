"""Samples as a StepOutput: only what was asked for becomes Python objects."""

import pytest
import torch

from engine.device.sampler import Logprobs
from engine.device.samples import SamplesOnHost, build_step_output
from engine.device.token_masks import Outcome
from engine.outputs import Row, StepPlan, TokenLogprobs
from engine.readouts import MAX_LOGPROBS


def logprobs(num_rows: int, first: int = 0) -> Logprobs:
    """Row i says -i of its token, and (100 i + j, -i - j / 32) in place j of the likeliest."""
    rows = torch.arange(first, first + num_rows)
    places = torch.arange(MAX_LOGPROBS)
    return Logprobs(-rows.float(), -rows[:, None] - places / 32, 100 * rows[:, None] + places)


def expected(row: int, count: int, rank: int | None = None) -> TokenLogprobs:
    return TokenLogprobs(-row, tuple((100 * row + place, -row - place / 32) for place in range(count)), rank)


@pytest.mark.parametrize(
    "wanted", [[None, 2, 0, None, 20], [1], [None, None, 3], [0, 0, 0], [5, 5, 5, 5], [20, None, 1]]
)
def test_each_row_is_told_what_it_asked_for(wanted: list[int | None]) -> None:
    tokens = torch.arange(len(wanted))
    samples = SamplesOnHost(tokens, logprobs(len(wanted)), wanted)
    plan = StepPlan.of(0, [Row(row, row, row) for row in range(len(wanted))])
    output = build_step_output(plan, samples, 0.0, 1.0)
    told = [(None if count is None else expected(row, count),) for row, count in enumerate(wanted)]
    assert output.logprobs == told
    assert output.tokens == [(token,) for token in tokens.tolist()]


def test_a_row_has_its_tokens_up_to_the_first_wrong_draft() -> None:
    rows = [
        Row(10, 0, 7),
        Row(11, 1, 5, (1, 2, 3), num_logits=0),
        Row(12, 2, 5, (1, 50, 51), num_logits=3),
        Row(13, 3, 5, (1, 60, 99), num_logits=3),
        Row(14, 4, 5, (8, 9, 1, 99), num_logits=2),
        Row(15, 5, 5, (1, 2), num_logits=1),
    ]
    tokens = torch.tensor([40, 50, 51, 52, 60, 61, 62, 70, 71, 80])
    plan = StepPlan.of(0, rows)
    samples = SamplesOnHost(tokens, logprobs(10), [0] * 10)
    output = build_step_output(plan, samples, 0.0, 1.0)
    assert output.tokens == [(40,), (), (50, 51, 52), (60, 61), (70,), (80,)]
    assert output.logprobs is not None
    found = [[entry.logprob for entry in row if entry is not None] for row in output.logprobs]
    assert found == [[0], [], [-1, -2, -3], [-4, -5], [-7], [-9]]


def test_a_row_that_masks_ended_has_no_token_and_problems_go_by_sequence() -> None:
    plan = StepPlan.of(0, [Row(10, 0, 7), Row(11, 1, 5, (1, 2), num_logits=0), Row(12, 2, 5, (1, 2))])
    outcome = Outcome([1], {1: "why"}, 1)
    output = build_step_output(plan, SamplesOnHost(torch.tensor([4, 5]), outcome=outcome), 0.0, 1.0)
    assert output.tokens == [(4,), (), ()]
    assert (output.problems, output.num_constrained) == ({12: "why"}, 1)
