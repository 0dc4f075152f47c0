"""Requests in a whole engine around a toy model: refused, late, aborted and drained; durations of stages.

Covers engine/delivery.py.
"""

import asyncio
import logging
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine.active_requests import ActiveRequest
from engine.errors import (
    ContextLengthExceeded,
    Draining,
    EngineError,
    InvalidRequest,
    QueueFull,
    QueueTimeout,
    RequestTimeout,
    StepFailed,
)
from engine.mailbox import Mailbox
from engine.outputs import FinishReason
from engine.schedule.sequence import Sequence
from engine.stream import RequestStream
from tests.engine.toy_engine import Recorder, expected, idle, request, toy_engine

ARRIVAL, NOW = 10.0, 18.0


@pytest.fixture
async def active(monkeypatch):
    monkeypatch.setattr("engine.active_requests.time", SimpleNamespace(perf_counter=lambda: NOW))
    sequence = Sequence.of(1, request([1, 2, 3], 5), seed=0, now=ARRIVAL, rank=0.0, eos_token_ids=frozenset())
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


async def test_time_limits_end_requests_with_an_error_of_their_own(run_ahead):
    async with toy_engine(
        run_ahead=run_ahead,
        max_num_seqs=1,
        queue_timeout_seconds=0.03,
        before_step=lambda _: time.sleep(0.002),
    ) as engine:
        running = engine.submit(replace(request([1], 200, ignore_eos=True), timeout_seconds=0.2))
        await anext(running)
        with pytest.raises(QueueTimeout):
            await engine.submit(request([3, 4], 5)).collect()
        with pytest.raises(RequestTimeout):
            await running.collect()
        await idle(engine)


async def test_abort_frees_everything_at_once(run_ahead):
    recorder = Recorder()
    async with toy_engine(run_ahead=run_ahead, max_num_seqs=1, observer=recorder) as engine:
        running = engine.submit(request([1, 2], 200, ignore_eos=True))
        waiting = engine.submit(request([3, 4], 200, ignore_eos=True))
        await anext(running)
        running.abort()
        running.abort()
        waiting.abort()
        await idle(engine)
        with pytest.raises(EngineError, match="aborted"):
            await waiting.collect()
        assert [times.finish_reason for times in recorder.finished] == [FinishReason.ABORT] * 2
        again = engine.submit(request([1, 2], 5, ignore_eos=True))
        assert (await again.collect()).text == expected([1, 2], 5, ignore_eos=True)
        again.abort()


async def test_a_cancelled_reader_aborts(run_ahead):
    async with toy_engine(run_ahead=run_ahead) as engine:
        stream = engine.submit(request([1, 2], 200, ignore_eos=True))
        await anext(stream)
        task = asyncio.create_task(stream.collect())
        await asyncio.sleep(0)  # it waits now
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(engine)
        assert engine.stats().generation_tokens_total < 200


async def test_drain_finishes_what_runs_and_refuses_the_rest():
    async with toy_engine() as engine:
        stream = engine.submit(request([1, 2], 50, ignore_eos=True))
        collected = asyncio.create_task(stream.collect())
        await engine.drain(10)
        assert (await collected).text == expected([1, 2], 50, ignore_eos=True)
        with pytest.raises(Draining):
            engine.submit(request([1]))


async def test_drain_ends_what_does_not_finish_in_time():
    release = threading.Event()
    async with toy_engine(before_step=lambda plan: release.wait(5) and None) as engine:
        stream = engine.submit(request([1, 2], 50))
        drained = asyncio.create_task(engine.drain(0.05))
        with pytest.raises(Draining):
            await stream.collect()
        release.set()
        await drained


@pytest.mark.parametrize(
    ("bad", "error", "param"),
    [
        ({"prompt": []}, InvalidRequest, "prompt"),
        ({"prompt": [97]}, InvalidRequest, "prompt"),
        ({"prompt": [-1]}, InvalidRequest, "prompt"),
        ({"prompt": [1], "stop_token_ids": frozenset([1000])}, InvalidRequest, "stop_token_ids"),
        ({"prompt": [1], "logit_bias": ((97, 1.0),)}, InvalidRequest, "logit_bias"),
        ({"prompt": [1] * 250, "max_tokens": 7}, ContextLengthExceeded, None),
    ],
)
async def test_what_cannot_run_is_refused_by_name(bad, error, param):
    async with toy_engine() as engine:
        with pytest.raises(error) as caught:
            engine.submit(request(**bad))
        assert caught.value.param == param
        assert engine.stats().waiting == 0


async def test_a_full_queue_refuses():
    hold = threading.Event()
    async with toy_engine(
        max_num_seqs=1, max_waiting=2, before_step=lambda plan: hold.wait(5) and None
    ) as engine:
        streams = [engine.submit(request([n], 1)) for n in range(3)]
        with pytest.raises(QueueFull):
            engine.submit(request([1]))
        hold.set()
        await asyncio.gather(*(stream.collect() for stream in streams))


async def test_detokenizer_faults_end_the_requests_of_the_step(caplog):
    async with toy_engine() as engine:
        engine._delivery._detokenizer.process = lambda jobs: 1 / 0
        with caplog.at_level(logging.CRITICAL, "monoloop.engine"), pytest.raises(StepFailed):
            await engine.submit(request([1, 2], 5)).collect()
        await idle(engine)
