"""Admission: refusals for good, and starts that the predicted peak allows."""

from array import array

import numpy as np
import pytest

from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.kv_layout import KVLayout
from engine.request import Request, SamplingParams
from engine.schedule.admission import Admission
from engine.schedule.pages import PagePool
from engine.schedule.sequence import Sequence

NOTHING = np.empty((1, 0), np.int32)


def make(number: int, num_prompt_tokens: int, max_tokens: int, **sampling) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    request = Request("r", (1,) * num_prompt_tokens, params)
    return Sequence(
        id=number,
        request=request,
        seed=0,
        arrival_seconds=0.0,
        rank=0.0,
        token_ids=array("i", request.prompt_token_ids),
        num_prompt_tokens=num_prompt_tokens,
        max_num_tokens=num_prompt_tokens + max_tokens,
        final_token_ids=frozenset(),
    )


class Desk:
    """An admission over a pool of single-token pages; starts sequences the way the scheduler does."""

    def __init__(self, overcommit: float, num_pages: int = 1000):
        self.pool = PagePool(num_pages, 1)
        self.admission = Admission(
            self.pool,
            KVLayout((0,), 1, token_budget=10_000, run_ahead=0),
            max_running=64,
            max_model_len=num_pages,
            token_budget=10_000,
            overcommit=overcommit,
            run_ahead=0,
        )
        self.free_slots = list(range(64))
        self.running: list[Sequence] = []
        self.step = 0

    def start(self, sequence: Sequence) -> bool:
        if self.admission.is_refused(sequence, self.step):
            return False
        if not self.admission.may_start(sequence, self.step, NOTHING, 0):
            return False
        sequence.slot = self.free_slots.pop()
        sequence.pages = [array("i", self.pool.allocate(sequence.num_tokens))]
        sequence.num_history_tokens = sequence.num_tokens
        self.admission.on_started(sequence, self.step, NOTHING)
        sequence.num_scheduled_tokens = sequence.num_tokens
        self.admission.on_prefill_done(sequence, self.step)
        self.running.append(sequence)
        return True

    def end(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.admission.on_pages_freed(sequence, self.pool.free(sequence.pages[0]))
        self.free_slots.append(sequence.slot)
        self.admission.on_ended(sequence.num_output_tokens, is_complete=True)

    def advance(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step += 1
            for sequence in self.running:
                sequence.token_ids.append(1)
                sequence.num_scheduled_tokens += 1
                sequence.pages[0].extend(self.pool.allocate(1))


def test_requests_that_can_never_run_are_refused():
    admission = Desk(0.5, num_pages=20).admission
    for bad, error in (
        (make(0, 0, 1), InvalidRequest),
        (make(0, 1, -1), InvalidRequest),
        (make(0, 15, 6), ContextLengthExceeded),
    ):
        with pytest.raises(error):
            admission.check(bad.request)
    admission.check(make(0, 15, 5).request)
    admission.check(make(0, 20, 0).request)


def test_without_overcommit_max_tokens_are_reserved():
    desk = Desk(overcommit=0.0)
    assert desk.start(make(0, 100, 400))
    assert desk.start(make(1, 100, 400)), "998 pages: the last token of an output needs none"
    assert not desk.start(make(2, 1, 3))
    assert desk.start(make(3, 1, 2))


def test_pages_of_sequences_that_end_before_the_peak_are_reused():
    """Two sequences of known lengths need at most 1,000 pages, although their sum is 1,500."""
    desk = Desk(overcommit=0.5)
    assert desk.start(make(0, 500, 3, ignore_eos=True))
    assert desk.start(make(1, 1, 900, ignore_eos=True))
    assert desk.admission.predicted_peak(desk.step) == 900
    assert desk.start(make(2, 400, 90, ignore_eos=True)), "at most 900 + 1 + ... while the first is there"
    assert not desk.start(make(3, 500, 90, ignore_eos=True))


def test_a_refusal_is_cached_until_something_changes():
    desk = Desk(overcommit=0.5)
    first = make(0, 500, 100, ignore_eos=True)
    assert desk.start(first)
    second = make(1, 500, 100, ignore_eos=True)
    assert not desk.start(second)
    assert desk.admission.is_refused(second, desk.step)
    assert not desk.admission.is_refused(make(2, 1, 1), desk.step), "somebody else is asked about anew"
    desk.advance(20)
    assert desk.admission.is_refused(second, desk.step)
    desk.end(first)
    assert desk.start(second)


def test_predictions_follow_the_lengths_of_outputs():
    desk = Desk(overcommit=0.5)
    for _ in range(1024):
        desk.admission.on_ended(40, is_complete=True)
    starts = 0
    while desk.start(make(starts, 10, 500)):
        starts += 1
    assert starts == 15, "10 + 39 tokens each, whatever they asked for, and a reserve of 16 for each but one"
    desk.advance(30)
    assert desk.start(make(98, 10, 500)), "those ten steps from their end leave room for its first ten tokens"
    assert not desk.start(make(99, 10, 500))
    assert desk.admission.predicted_peak(desk.step) <= 1000


def test_with_full_overcommit_a_sequence_starts_if_it_fits_now():
    desk = Desk(overcommit=1.0)
    for _ in range(1024):
        desk.admission.on_ended(400, is_complete=True)
    starts = 0
    while desk.start(make(starts, 20, 500)):
        starts += 1
    assert starts == 50, "nothing is predicted"


def test_the_reserve_shrinks_as_overcommit_grows():
    starts = {}
    for overcommit in (0.25, 0.5, 0.75):
        desk = Desk(overcommit)
        for _ in range(1024):
            desk.admission.on_ended(40, is_complete=True)
        starts[overcommit] = 0
        while desk.start(make(starts[overcommit], 10, 500)):
            starts[overcommit] += 1
    assert starts == {0.25: 14, 0.5: 15, 0.75: 17}, "49 tokens each, and 24, 16 or 8 kept free"


def test_a_sequence_that_outlives_its_prediction_gets_another():
    desk = Desk(overcommit=0.5)
    for _ in range(1024):
        desk.admission.on_ended(40, is_complete=True)
    assert desk.start(make(0, 10, 500))
    desk.advance(45)
    assert not desk.admission.is_refused(make(1, 1, 1), desk.step)
    assert desk.admission.predicted_peak(desk.step) >= 10 + 80, "longer than all seen: twice as long"
