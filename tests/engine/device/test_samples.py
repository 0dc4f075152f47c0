"""What was sampled, as a StepOutput: only what was asked for becomes Python objects."""

import numpy as np
import pytest
import torch

from engine.device.sampler import Logprobs
from engine.device.samples import HostSamples, step_output
from engine.device.scores import Scores
from engine.outputs import DecodeRows, Row, Scored, StepPlan, TokenLogprobs
from engine.request import MAX_LOGPROBS


def logprobs(num_rows: int, first: int = 0) -> Logprobs:
    """Row i says -i of its token, and (100 i + j, -i - j / 32) in place j of the likeliest."""
    rows = torch.arange(first, first + num_rows)
    places = torch.arange(MAX_LOGPROBS)
    return Logprobs(-rows.float(), -rows[:, None] - places / 32, 100 * rows[:, None] + places)


def scores(num_rows: int, first: int = 0) -> Scores:
    """The same of tokens of a prompt, of which that of row i is the (i + 1)th likeliest."""
    return Scores(*logprobs(num_rows, first), torch.arange(first, first + num_rows) + 1)


def expected(row: int, count: int, rank: int | None = None) -> TokenLogprobs:
    return TokenLogprobs(-row, tuple((100 * row + place, -row - place / 32) for place in range(count)), rank)


def decode_plan(num_rows: int, chunks: tuple[Row, ...] = ()) -> StepPlan:
    rows = list(range(num_rows))
    return StepPlan(0, DecodeRows(rows, rows, rows, rows), chunks, 0)


@pytest.mark.parametrize(
    "wanted", [[None, 2, 0, None, 20], [1], [None, None, 3], [0, 0, 0], [5, 5, 5, 5], [20, None, 1]]
)
def test_each_row_is_told_what_it_asked_for(wanted: list[int | None]) -> None:
    tokens = torch.arange(len(wanted))
    samples = HostSamples(tokens, logprobs(len(wanted)), wanted)
    output = step_output(decode_plan(len(wanted)), samples, 0.0, 1.0)
    told = [(None if count is None else expected(row, count),) for row, count in enumerate(wanted)]
    assert output.logprobs == told
    assert output.tokens == [(token,) for token in tokens.tolist()]


def test_scores_stay_arrays() -> None:
    """The detokenizer's thread makes objects of them, a prompt's thousands at a time."""
    samples = HostSamples(torch.empty(0, dtype=torch.int64), scores=[scores(3)])
    chunk = Row(7, 0, 0, (1, 2, 3, 4), False, scored=Scored(0, (2, 3, 4), 2))
    output = step_output(StepPlan(0, DecodeRows.empty(), (chunk,), 4), samples, 0.0, 1.0)
    assert output.scores is not None and output.scores[0] is not None
    assert all(isinstance(column, np.ndarray) for column in output.scores[0])
    assert [column.shape for column in output.scores[0]] == [(3,), (3, 2), (3, 2), (3,)]


def test_scores_are_those_of_their_chunks_whatever_the_slices() -> None:
    chunks = (
        Row(0, 0, 0, (5,) * 4, False, scored=Scored(0, (5,) * 4, 3)),
        Row(1, 1, 0, (5,) * 9, False),
        Row(2, 2, 0, (5,) * 2, False, scored=Scored(0, (5,) * 2, 0)),
        Row(3, 3, 0, (5,) * 3, False, scored=Scored(0, (5,) * 3, 20)),
    )
    plan = StepPlan(0, DecodeRows.empty(), chunks, 18)
    for sizes in ([9], [1] * 9, [5, 4]):
        slices = [scores(size, sum(sizes[:number])) for number, size in enumerate(sizes)]
        samples = HostSamples(torch.empty(0, dtype=torch.int64), scores=slices)
        output = step_output(plan, samples, 0.0, 1.0)
        assert output.scores is not None
        told = [None if part is None else list(part.each()) for part in output.scores]
        assert told == [
            [expected(row, 3, row + 1) for row in range(4)],
            None,
            [expected(row, 0, row + 1) for row in range(4, 6)],
            [expected(row, 20, row + 1) for row in range(6, 9)],
        ]
