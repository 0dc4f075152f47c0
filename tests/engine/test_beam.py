"""Beam search finds the outputs of transformers, and leaves no state behind."""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.beam import _Search, search_beams
from engine.errors import (
    Draining,
    EngineError,
    InvalidRequest,
    QueueFull,
    RequestTimeout,
    StepFailed,
)
from engine.outputs import FinishReason
from engine.request import BeamParams, Request, SamplingParams
from models.decoder import Decoder
from models.loader import load
from tests.engine.tiny_engine import tiny_engine, tiny_request, tiny_tokenizer
from tests.engine.toy_engine import idle
from tests.models.harness import CPU, files_of
from tests.tiny_checkpoint import tiny_llama

VOCAB_SIZE = 24
ENDS = frozenset({3, 7})
PROMPT = (*range(8, 24), 9, 11, 13)


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    """Few tokens and far apart in likelihood, so that beams end at different lengths."""
    return tiny_llama(11, vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, initializer_range=0.3)


@pytest.fixture(scope="module")
def decoder(reference: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("beams")
    reference.save_pretrained(path)
    with torch.inference_mode():
        return load(files_of(path), torch.float32, CPU)


def beam_request(max_tokens: int, **sampling: Any) -> Request:
    ends = {"stop_token_ids": ENDS} | sampling
    return Request("b", PROMPT, SamplingParams(max_tokens=max_tokens, **ends), return_tokens=True)


async def outputs(engine: Any, request: Request, beams: BeamParams, n: int) -> list[Any]:
    return [await stream.collect() for stream in search_beams(engine, request, beams, n)]


def before_logits(monkeypatch: pytest.MonkeyPatch, decoder: Decoder, act: Callable[[int], None]) -> None:
    """Call `act` on the device thread in every step, with the step's number from 1."""
    logits, numbers = type(decoder).logits, count(1)

    def logits_after_act(self, hidden):
        act(next(numbers))
        return logits(self, hidden)

    monkeypatch.setattr(type(decoder), "logits", logits_after_act)


def ids_of(delta: Any) -> list[int]:
    return [token.piece.token_id for token in delta.tokens]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -1.0])
async def test_outputs_are_those_of_transformers(reference, decoder, length_penalty, early_stopping) -> None:
    lengths = set()
    async with tiny_engine(model=decoder, has_eos=False) as engine:
        for width, max_tokens in [(1, 5), (3, 12), (4, 1), (7, 14)]:
            with torch.inference_mode():
                expected = reference.generate(
                    torch.tensor([PROMPT]),
                    attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
                    num_beams=width,
                    num_return_sequences=width,
                    do_sample=False,
                    max_new_tokens=max_tokens,
                    eos_token_id=sorted(ENDS),
                    pad_token_id=0,
                    length_penalty=length_penalty,
                    early_stopping=early_stopping,
                )[:, len(PROMPT) :].tolist()
            beams = BeamParams(width, length_penalty, early_stopping)
            found = await outputs(engine, beam_request(max_tokens), beams, width)
            for answer, wanted in zip(found, expected, strict=True):
                ids = ids_of(answer)
                # Behind the token that ends an output transformers pads.
                ended = next((place for place, token_id in enumerate(wanted, 1) if token_id in ENDS), None)
                assert ids == wanted[:ended], f"width {width}: {found}"
                assert answer.finish_reason is (FinishReason.STOP if ids[-1] in ENDS else FinishReason.LENGTH)
                assert answer.num_tokens == len(ids)
                lengths.add(len(ids))
    assert len(lengths) > 3, "the outputs are of a few lengths only: this shows little"


async def test_log_probabilities_are_those_of_any_request(decoder) -> None:
    async with tiny_engine(model=decoder, has_eos=False) as engine:
        [best] = await outputs(engine, beam_request(8, logprobs=2), BeamParams(3), 1)
        for place, token in enumerate(best.tokens):
            prompt = (*PROMPT, *ids_of(best)[:place])
            allowed = SamplingParams(
                max_tokens=1, logprobs=2, allowed_token_ids=frozenset({token.piece.token_id}), ignore_eos=True
            )
            [told] = (await engine.submit(Request("r", prompt, allowed)).collect()).tokens
            assert token.logprob == pytest.approx(told.logprob, abs=1e-4)
            assert [piece.token_id for piece, _ in token.top] == [piece.token_id for piece, _ in told.top]


async def test_no_output_ends_before_min_tokens(decoder) -> None:
    async with tiny_engine(model=decoder, has_eos=False) as engine:
        for answer in await outputs(engine, beam_request(12, min_tokens=9), BeamParams(4), 4):
            assert not ENDS.intersection(ids_of(answer)[:9])


async def test_text_is_decoded_without_the_token_that_ended_it() -> None:
    ends = frozenset(range(10))
    reasons = set()
    async with tiny_engine() as engine:
        quiet = tiny_request("hello", 6, stop_token_ids=ends)
        told = await outputs(engine, replace(quiet, return_tokens=True), BeamParams(4), 4)
        texts = [(answer.text, answer.tokens) for answer in await outputs(engine, quiet, BeamParams(4), 4)]
    for answer in told:
        ids = ids_of(answer)
        ended = ids[-1] in ends
        assert answer.text == tiny_tokenizer().decode(ids[:-1] if ended else ids)
        assert answer.stop_reason == (ids[-1] if ended else None)
        assert answer.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        reasons.add(answer.finish_reason)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}, "all outputs ended alike: this shows little"
    assert texts == [(answer.text, ()) for answer in told], "tokens are told to who asks for them"


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("num_steps", [0, 1, 4])
async def test_aborting_one_output_ends_the_search(decoder, monkeypatch, num_steps: int, place: int) -> None:
    """Whether it has begun or not: nobody waits any longer, and nothing is held or computed."""
    has_come, may_go_on = threading.Event(), threading.Event()

    def stop_at(step: int) -> None:
        if step == num_steps:
            has_come.set()
            may_go_on.wait(10)

    async with tiny_engine(model=decoder, has_eos=False) as engine, asyncio.timeout(20):
        before_logits(monkeypatch, decoder, stop_at)
        streams = search_beams(engine, beam_request(100, stop_token_ids=frozenset()), BeamParams(4), 2)
        waiters = [asyncio.ensure_future(stream.collect()) for stream in streams]
        if num_steps:
            assert await asyncio.to_thread(has_come.wait, 10)
            assert engine.stats().pages_used
        streams[place].abort()
        for error in await asyncio.gather(*waiters, return_exceptions=True):
            assert type(error) is EngineError and "aborted" in str(error)
        may_go_on.set()
        await idle(engine)
        # While these tokens are computed a search that went on would take as many steps, four beams in each.
        after = Request("r", PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))
        assert (await engine.submit(after).collect()).num_tokens == 20
        begun = max(0, 1 + 4 * (num_steps - 1))
        assert engine.stats().generation_tokens_total <= begun + 20


async def test_every_output_ends_with_the_error_of_a_step(decoder, monkeypatch, caplog) -> None:
    def fail_at_third(step: int) -> None:
        if step == 3:
            raise RuntimeError("no")

    async with tiny_engine(model=decoder, has_eos=False) as engine:
        before_logits(monkeypatch, decoder, fail_at_third)
        with caplog.at_level(logging.CRITICAL, "monoloop.engine"):
            for stream in search_beams(engine, beam_request(5), BeamParams(2), 2):
                with pytest.raises(StepFailed):
                    await stream.collect()
        [best] = await outputs(engine, beam_request(5), BeamParams(2), 1)
        assert best.num_tokens, "the next search finds the engine as it was"


async def test_a_search_that_finds_too_few_outputs_ends_all_the_same(decoder, monkeypatch) -> None:
    texts = _Search._texts
    monkeypatch.setattr(_Search, "_texts", lambda search: texts(search)[:1])
    async with tiny_engine(model=decoder, has_eos=False) as engine:
        first, second = search_beams(engine, beam_request(5), BeamParams(2), 2)
        assert (await first.collect()).num_tokens
        with pytest.raises(EngineError):
            await asyncio.wait_for(second.collect(), 10)


async def test_a_search_ends_at_its_time_limit(decoder) -> None:
    async with tiny_engine(model=decoder, has_eos=False) as engine:
        request = replace(beam_request(100, stop_token_ids=frozenset()), timeout_seconds=0.05)
        for stream in search_beams(engine, request, BeamParams(8), 2):
            with pytest.raises(RequestTimeout):
                await asyncio.wait_for(stream.collect(), 10)
        await engine.drain(10)


async def test_drain_waits_for_the_end_of_a_search(decoder) -> None:
    async with tiny_engine(model=decoder, has_eos=False) as engine:
        expected = await outputs(engine, beam_request(12), BeamParams(3), 3)
        waiting = [
            asyncio.ensure_future(stream.collect())
            for stream in search_beams(engine, beam_request(12), BeamParams(3), 3)
        ]
        await engine.drain(20)
        assert await asyncio.gather(*waiting) == expected
        with pytest.raises(Draining):
            search_beams(engine, beam_request(12), BeamParams(3), 3)


async def test_drain_ends_a_search_that_does_not_finish_in_time(decoder) -> None:
    async with tiny_engine(model=decoder, has_eos=False) as engine:
        request = beam_request(200, stop_token_ids=frozenset())
        waiting = [
            asyncio.ensure_future(stream.collect())
            for stream in search_beams(engine, request, BeamParams(8), 2)
        ]
        await engine.drain(0.05)
        for result in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10):
            assert isinstance(result, Draining), result


async def test_a_search_that_has_begun_is_not_ended_by_a_queue_that_fills_up(decoder) -> None:
    async with tiny_engine(model=decoder, has_eos=False, max_num_seqs=1, max_waiting=1) as engine:
        expected = await outputs(engine, beam_request(6), BeamParams(3), 3)
        found = search_beams(engine, beam_request(6), BeamParams(3), 3)
        waiting = [asyncio.ensure_future(stream.collect()) for stream in found]
        other = engine.submit(beam_request(8))
        with pytest.raises(QueueFull):
            search_beams(engine, beam_request(6), BeamParams(3), 3)
        assert await asyncio.gather(*waiting) == expected
        await other.collect()


async def test_steps_do_not_count_as_output_lengths(decoder) -> None:
    async with tiny_engine(model=decoder, has_eos=False) as engine:
        lengths = engine._scheduler._admission._lengths
        before = lengths._num_seen
        await outputs(engine, beam_request(6), BeamParams(3), 3)
        assert lengths._num_seen == before
        await engine.submit(beam_request(3)).collect()
        assert lengths._num_seen == before + 1


@pytest.mark.parametrize(("max_tokens", "width", "n"), [(5, 19, 1), (0, 2, 1), (5, 2, 3), (5, 2, 0)])
async def test_invalid_searches_are_refused(decoder, max_tokens: int, width: int, n: int) -> None:
    async with tiny_engine(model=decoder, has_eos=False) as engine:
        with pytest.raises(InvalidRequest):
            search_beams(engine, beam_request(max_tokens), BeamParams(width), n)
        with pytest.raises(InvalidRequest):
            search_beams(engine, replace(beam_request(5), prompt_token_ids=(VOCAB_SIZE,)), BeamParams(2), 2)
        await engine.drain(10)
