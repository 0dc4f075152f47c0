"""Beam search finds what transformers finds, and leaves nothing behind."""

import asyncio
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.beam import search_beams
from engine.errors import Draining, InvalidRequest
from engine.outputs import FinishReason
from engine.request import BeamParams, Request, SamplingParams
from models.loader import load
from tests.engine.tiny_engine import tiny_engine, tiny_request
from tests.models.harness import CPU, files_of

VOCAB_SIZE = 24
ENDS = frozenset({3, 7})
PROMPT = (*range(8, 24), 9, 11, 13)


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    """Few tokens and far apart in likelihood, so that beams end at different lengths."""
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def decoder(reference: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("beams")
    reference.save_pretrained(path)
    with torch.inference_mode():
        return load(files_of(path), torch.float32, CPU)


def beam_request(max_tokens: int, **sampling: Any) -> Request:
    ends = {"stop_token_ids": ENDS} | sampling
    return Request("b", PROMPT, SamplingParams(max_tokens=max_tokens, **ends), tell_tokens=True)


async def outputs(engine: Any, request: Request, beams: BeamParams, n: int) -> list[Any]:
    return [await stream.collect() for stream in search_beams(engine, request, beams, n)]


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


async def test_log_probabilities_are_told_as_in_any_request(decoder) -> None:
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
    async with tiny_engine() as engine:
        request = tiny_request("hello", 6, stop_token_ids=frozenset(range(60, 70)))
        for answer in await outputs(engine, request, BeamParams(4), 4):
            assert answer.tokens == ()
            assert answer.stop_reason in (None, *range(60, 70))
            assert answer.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)


async def test_aborting_one_output_ends_the_search(decoder) -> None:
    async with tiny_engine(model=decoder, has_eos=False) as engine:
        streams = search_beams(engine, beam_request(100, stop_token_ids=frozenset()), BeamParams(4), 2)
        waiting = asyncio.ensure_future(streams[0].collect())
        await asyncio.sleep(0)  # the search submits its first step
        await asyncio.sleep(0)
        assert engine.stats().waiting + engine.stats().running == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await engine.drain(10)
        assert engine.stats().generation_tokens_total <= 1


async def test_every_output_ends_with_the_error_of_a_step(decoder) -> None:
    async with tiny_engine(model=decoder, has_eos=False) as engine:
        await engine.drain()
        for stream in search_beams(engine, beam_request(5), BeamParams(2), 2):
            with pytest.raises(Draining):
                await stream.collect()


@pytest.mark.parametrize(("max_tokens", "width"), [(5, 19), (0, 2)])
async def test_what_cannot_be_searched_is_refused(decoder, max_tokens: int, width: int) -> None:
    async with tiny_engine(model=decoder, has_eos=False) as engine:
        with pytest.raises(InvalidRequest):
            search_beams(engine, beam_request(max_tokens), BeamParams(width), 1)
