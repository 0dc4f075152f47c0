"""Durations of a request's stages, for every stage that it may end in."""

from types import SimpleNamespace

import pytest

from engine.active_request import ActiveRequest
from engine.mailbox import Mailbox
from engine.outputs import FinishReason
from engine.request import Request, SamplingParams
from engine.schedule.sequence import Sequence
from engine.stream import RequestStream

ARRIVAL, NOW = 10.0, 18.0


@pytest.fixture
async def active(monkeypatch):
    monkeypatch.setattr("engine.active_request.time", SimpleNamespace(perf_counter=lambda: NOW))
    request = Request("r", (1, 2, 3), SamplingParams(max_tokens=5))
    sequence = Sequence.of(1, request, seed=0, now=ARRIVAL, rank=0.0, eos_token_ids=frozenset())
    mailbox = Mailbox()
    stream = RequestStream("r", 3, mailbox, abort=lambda: None, on_collect=lambda: None)
    return ActiveRequest(sequence, stream, mailbox, ARRIVAL)


def stages(active):
    times = active.times(FinishReason.LENGTH)
    assert times.end_to_end_seconds == NOW - ARRIVAL
    return times.queue_seconds, times.prefill_seconds, times.decode_seconds


async def test_a_request_that_never_started_has_no_stages(active):
    assert stages(active) == (None, None, None)


async def test_a_request_that_ends_in_its_prompt_has_waited(active):
    active.sequence.first_scheduled_seconds = 11.0
    assert stages(active) == (1.0, None, None)


async def test_one_token_takes_no_time_to_decode(active):
    active.sequence.first_scheduled_seconds, active.first_token = 11.0, 13.0
    assert stages(active) == (1.0, 2.0, 0.0)


async def test_decoding_ends_with_the_last_token(active):
    active.sequence.first_scheduled_seconds, active.first_token, active.last_token = 11.0, 13.0, 17.0
    assert stages(active) == (1.0, 2.0, 4.0)


async def test_counts_are_those_of_the_sequence_and_the_stream(active):
    active.sequence.num_preemptions, active.stream.num_output_tokens = 2, 4
    times = active.times(FinishReason.STOP)
    counts = (times.prompt_tokens, times.generation_tokens, times.max_tokens, times.preemptions)
    assert (times.finish_reason, counts) == (FinishReason.STOP, (3, 4, 5, 2))
