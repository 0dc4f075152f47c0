"""The step loop around a toy model: texts, preemption, shared prompts, and steps that fail, without leaks."""

import asyncio
import gc
import logging

import pytest

from engine.control_tokens import MARK
from engine.errors import DeviceLost, EngineDead, StepFailed
from engine.outputs import NO_TOKEN, FinishReason, StepPlan
from engine.request import ReasoningSpan
from tests.engine.toy import reference
from tests.engine.toy_engine import CHARS, Recorder, expected, idle, request, to_text, toy_engine


async def test_streams_join_to_the_models_text(run_ahead):
    recorder = Recorder()
    async with toy_engine(run_ahead=run_ahead, observer=recorder) as engine:
        prompts = [[n, n + 1, n + 2] for n in range(12)]
        streams = [engine.submit(request(p, 30, ignore_eos=True)) for p in prompts]
        results = await asyncio.gather(*(stream.collect() for stream in streams))
        for prompt, stream, result in zip(prompts, streams, results, strict=True):
            assert result.text == expected(prompt, 30, ignore_eos=True)
            assert result.finish_reason is FinishReason.LENGTH
            assert result.num_tokens == stream.num_output_tokens == 30
            assert stream.num_prompt_tokens == 3
        await idle(engine)
        assert engine.stats().generation_tokens_total == 12 * 30
        assert engine.stats().prompt_tokens_total == 12 * 3
    assert recorder.first_tokens == 12
    assert len(recorder.finished) == 12
    assert all(times.generation_tokens == 30 for times in recorder.finished)
    assert all(times.queue_seconds >= 0 and times.prefill_seconds >= 0 for times in recorder.finished)


async def test_eos_counts_and_is_not_shown(run_ahead):
    prompt = next([a, b] for a in range(90) for b in range(90) if len(reference([a, b], 30, seed=7)) == 4)
    async with toy_engine(run_ahead=run_ahead) as engine:
        stream = engine.submit(request(prompt, 30))
        result = await stream.collect()
        assert result.finish_reason is FinishReason.STOP
        assert result.text == expected(prompt, 30)[:3]
        assert stream.num_output_tokens == 4


async def test_a_stop_string_ends_the_sequence_and_its_counts(run_ahead):
    text = expected([1, 2, 3], 100, ignore_eos=True)
    async with toy_engine(run_ahead=run_ahead) as engine:
        stream = engine.submit(request([1, 2, 3], 100, ignore_eos=True, stop=(text[4:6],)))
        result = await stream.collect()
        assert result.text == text[:4]
        assert result.stop_reason == text[4:6]
        assert stream.num_output_tokens == 6
        await idle(engine)
        assert engine.stats().generation_tokens_total == 6


async def test_stop_strings_wait_for_the_end_of_reasoning_and_its_tokens_are_counted(run_ahead):
    prompt = [10, 20, 30]
    text = expected(prompt, 30, ignore_eos=True)
    stop = next(char for char in text[12:] if char in text[:8])
    place = text.index(stop, 12)
    marks = ((CHARS.index(text[10]), text[10]),)
    span = ReasoningSpan(MARK + "?", MARK + text[10], is_open=True)
    assert text.index(text[10]) == 10, "the end of the reasoning"
    async with toy_engine(run_ahead=run_ahead) as engine:
        for collected in (True, False):
            asked = request(prompt, 30, ignore_eos=True, stop=(stop,), marks=marks, reasoning=span)
            stream = engine.submit(asked)
            deltas = [await stream.collect()] if collected else [delta async for delta in stream]
            assert "".join(delta.text for delta in deltas) == text[:10] + MARK + text[10:place]
            assert deltas[-1].stop_reason == stop
            assert (stream.num_output_tokens, stream.num_reasoning_tokens) == (place + 1, 11)


async def test_preemption_neither_changes_nor_repeats_text(run_ahead):
    async with toy_engine(num_pages=12, run_ahead=run_ahead, overcommit=1.0) as engine:
        prompts = [[n, n + 1, n + 2] for n in range(4)]
        streams = [engine.submit(request(p, 30, ignore_eos=True)) for p in prompts]
        results = await asyncio.gather(*(stream.collect() for stream in streams))
        assert [r.text for r in results] == [expected(p, 30, ignore_eos=True) for p in prompts]
        assert engine.stats().preemptions_total >= 2


async def test_a_prompt_is_computed_once_for_its_samples_and_for_those_who_come_later(run_ahead):
    prompt = list(range(40, 50))  # two full pages of four, and two tokens
    async with toy_engine(run_ahead=run_ahead) as engine:
        requests = [request(prompt, 8, seed=seed, ignore_eos=True) for seed in (7, 8, 9)]
        streams = engine.submit_group(requests)
        results = await asyncio.gather(*(stream.collect() for stream in streams))
        for seed, result in zip((7, 8, 9), results, strict=True):
            assert result.text == to_text(reference(prompt, 8, seed=seed, ignore_eos=True))
        assert [stream.num_cached_tokens for stream in streams] == [0, 9, 9]
        later = engine.submit(request([*prompt[:9], 1], 5, ignore_eos=True))
        assert (await later.collect()).text == expected([*prompt[:9], 1], 5, ignore_eos=True)
        assert later.num_cached_tokens == 8
        await idle(engine)
        stats = engine.stats()
        assert stats.queried_prompt_tokens_total == 40
        assert stats.cached_prompt_tokens_total == 9 + 9 + 8
        assert stats.pages_cached > 0
        assert stats.pages_predicted == 0


async def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(run_ahead, caplog):
    def fail_on_marked_prompt(plan: StepPlan) -> None:
        if any(init.prompt_token_ids[0] == 66 for init in plan.inits.values()):
            raise RuntimeError("broken on purpose")

    async with toy_engine(run_ahead=run_ahead, before_step=fail_on_marked_prompt) as engine:
        with caplog.at_level(logging.CRITICAL, "monoloop.engine"), pytest.raises(StepFailed):
            await engine.submit(request([66, 1], 5)).collect()
        await idle(engine)
        result = await engine.submit(request([1, 2], 5, ignore_eos=True)).collect()
        assert result.text == expected([1, 2], 5, ignore_eos=True)
        assert engine.is_alive


async def test_out_of_memory_ends_the_requests_of_the_step(run_ahead, caplog):
    def run_out(plan: StepPlan) -> None:
        if any(init.prompt_token_ids[0] == 66 for init in plan.inits.values()):
            raise StepFailed("A step of 9 tokens does not fit into the memory of cuda:0")

    async with toy_engine(run_ahead=run_ahead, before_step=run_out) as engine:
        with (
            caplog.at_level(logging.CRITICAL, "monoloop.engine"),
            pytest.raises(StepFailed, match="9 tokens"),
        ):
            await engine.submit(request([66, 1], 5)).collect()
        result = await engine.submit(request([1, 2], 5, ignore_eos=True)).collect()
        assert result.text == expected([1, 2], 5, ignore_eos=True)


async def test_a_lost_device_ends_the_engine_and_every_stream(run_ahead, caplog):
    def lose(plan: StepPlan) -> None:
        if any(init.prompt_token_ids[0] == 66 for init in plan.inits.values()):
            raise DeviceLost("The device has failed: an illegal memory access was encountered")

    async with toy_engine(run_ahead=run_ahead, before_step=lose) as engine:
        bystander = engine.submit(request([1, 2], 200, ignore_eos=True))
        await anext(bystander)
        with caplog.at_level(logging.CRITICAL + 1, "monoloop.engine"):
            with pytest.raises(EngineDead):
                await engine.submit(request([66, 1], 5)).collect()
            with pytest.raises(EngineDead):
                await bystander.collect()
            await engine.wait_dead()
        assert not engine.is_alive
    del engine, bystander
    gc.collect()
    assert not caplog.records, "steps launched behind the lost one are heard of no more"


async def test_a_model_without_finite_numbers_ends_that_request_alone():
    async with toy_engine() as engine:
        sample = engine.toy_runner._sample
        broken = {66}

        def nothing_finite(slot, position):
            token = sample(slot, position)
            first = engine.toy_runner.cache[engine.toy_runner.tables[slot][0][0], 0]
            return NO_TOKEN if first in broken and position > 4 else token

        engine.toy_runner._sample = nothing_finite
        doomed = engine.submit(request([66, 1], 20, ignore_eos=True))
        sound = engine.submit(request([1, 2], 20, ignore_eos=True))
        with pytest.raises(StepFailed, match="no finite"):
            await doomed.collect()
        assert (await sound.collect()).text == expected([1, 2], 20, ignore_eos=True)
        assert engine.stats().corrupted_requests_total == 1
        await idle(engine)


async def test_a_dead_step_loop_ends_every_stream(caplog):
    async with toy_engine() as engine:
        stream = engine.submit(request([1, 2], 200, ignore_eos=True))
        await anext(stream)
        engine._scheduler.plan = None  # not callable: the loop itself breaks
        with caplog.at_level(logging.CRITICAL + 1, "monoloop.engine"), pytest.raises(EngineDead):
            await stream.collect()
        await engine.wait_dead()
        assert not engine.is_alive
        with pytest.raises(EngineDead):
            engine.submit(request([1]))


async def test_a_reader_that_comes_late_gets_everything_in_one_delta():
    async with toy_engine() as engine:
        stream = engine.submit(request([1, 2], 40, ignore_eos=True))
        for _ in range(10_000):
            if stream._mailbox.is_closed:
                break
            await asyncio.sleep(0.001)
        delta = await anext(stream)
        assert delta.text == expected([1, 2], 40, ignore_eos=True)
        assert delta.num_tokens == 40
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
