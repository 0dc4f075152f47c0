"""Embeddings: a prompt becomes the mean of its hidden states, or the last one, however it is cut."""

import numpy as np
import pytest
import torch

from engine import Engine
from engine.config import EngineConfig
from engine.device.runner import ModelRunner
from engine.errors import ContextLengthExceeded, EngineError
from engine.outputs import DecodeRows, FinishReason, Pool, Row, SlotInit, StepPlan
from engine.request import Request, SamplingParams
from tests.engine.toy import reference
from tests.engine.toy_engine import to_text, toy_engine

PROMPT = tuple(range(5, 45))


def pooled(prompt, pooling="mean", **options) -> Request:
    return Request("e", tuple(prompt), SamplingParams(max_tokens=0), pooling=pooling, **options)


async def vector(engine, request: Request) -> np.ndarray:
    stream = engine.submit(request)
    delta = await stream.collect()
    assert (delta.text, delta.num_tokens, delta.finish_reason) == ("", 0, FinishReason.LENGTH)
    assert stream.num_output_tokens == 0
    return stream.pooled


def in_chunks(model, pooling: str, *lengths: int) -> np.ndarray:
    """The vector of PROMPT, computed in steps of these lengths beside a sequence that is sampled."""
    config = EngineConfig(device=model.device.type, kv_tokens=256, max_model_len=64, max_num_seqs=4)
    runner = ModelRunner.around(model, config, 64, (3,))
    start = 0
    for step, length in enumerate(lengths):
        init = SlotInit(SamplingParams(max_tokens=0), 0, PROMPT, ()) if step == 0 else None
        pages = (0, 1, 2) if step == 0 else ()
        is_last = start + length == len(PROMPT)
        row = Row(
            7, 0, start, PROMPT[start : start + length], False, pages, init, pool=Pool(pooling, is_last)
        )
        other = Row(8, 1, 0, (9,), True, (4,), SlotInit(SamplingParams(max_tokens=5), 0, (9,), ()))
        rows = tuple(sorted((other, row), key=lambda row: row.num_tokens > 1))
        output = runner.launch(StepPlan(step, DecodeRows.empty(), rows, length + 1)).wait()
        assert sorted(map(len, output.tokens)) == [0, 1], "only the other row is sampled"
        start += length
        assert (output.pooled is not None) == is_last
    return output.pooled[7]


async def test_requests_of_one_prompt_have_the_same_mean():
    """Samples of one prompt share its pages; a mean needs every token all the same."""
    async with toy_engine() as engine:
        for stream in engine.submit_group([pooled(range(20)) for _ in range(3)]):
            await stream.collect()
            assert stream.pooled.tolist() == [9.5, 20.0]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_where_a_prompt_is_cut_makes_no_difference(model, pooling):
    whole = in_chunks(model, pooling, 40)
    assert whole.dtype == np.float32
    for lengths in ((1, 39), (39, 1), (16, 16, 8), (7, 1, 32)):
        np.testing.assert_allclose(in_chunks(model, pooling, *lengths), whole, atol=1e-5)


def test_the_last_state_is_not_the_mean(model):
    assert np.abs(in_chunks(model, "last", 40) - in_chunks(model, "mean", 40)).max() > 1e-2


async def test_many_prompts_beside_streams_and_preemptions(run_ahead):
    async with toy_engine(num_pages=40, token_budget=16, run_ahead=run_ahead, overcommit=1.0) as engine:
        prompts = [tuple(range(i, i + 20 + i)) for i in range(12)]
        streams = [engine.submit(pooled(prompt)) for prompt in prompts]
        talkers = [
            engine.submit(Request("t", (i, i), SamplingParams(max_tokens=40, seed=7))) for i in range(8)
        ]
        for prompt, stream in zip(prompts, streams, strict=True):
            await stream.collect()
            assert stream.pooled.tolist() == [np.float32(np.mean(prompt)), len(prompt)]
        for i, talker in enumerate(talkers):
            assert (await talker.collect()).text.startswith(to_text(reference([i, i], 40, seed=7))[:-1])
        assert engine.stats().preemptions_total > 0, "the pool is too large for this test"


async def test_a_mean_needs_every_token_and_the_last_state_only_itself():
    async with toy_engine() as engine:
        prompt = list(range(20))
        assert (await vector(engine, pooled(prompt))).tolist() == [9.5, 20.0]
        assert engine.stats().cached_prompt_tokens_total == 0
        assert (await vector(engine, pooled(prompt, "last"))).tolist() == [19.0, 20.0]
        await vector(engine, pooled(prompt, "last"))
        assert engine.stats().cached_prompt_tokens_total == 16, "the second finds what the first has computed"
        assert (await vector(engine, pooled(prompt))).tolist() == [9.5, 20.0]
        assert engine.stats().cached_prompt_tokens_total == 16


async def test_a_prompt_may_fill_the_context_and_no_more():
    async with toy_engine(max_model_len=32) as engine:
        assert (await vector(engine, pooled(range(32)))).tolist() == [15.5, 32.0]
        with pytest.raises(ContextLengthExceeded):
            engine.submit(pooled(range(33)))


async def test_an_aborted_one_has_no_vector():
    async with toy_engine() as engine:
        stream = engine.submit(pooled(range(20)))
        stream.abort()
        with pytest.raises(EngineError, match="aborted"):
            await stream.collect()
        assert stream.pooled is None


async def test_equal_to_the_hidden_states_of_transformers(smollm, smollm_reference):
    config = EngineConfig(model=str(smollm.weights), dtype="float32", kv_tokens=512, token_budget=16)
    text = "Embeddings of a text are the mean of what the model makes of its tokens, all of them, in order."
    engine = await Engine.start(config)
    try:
        [prompt] = await engine.tokenizer.encode_batch([text])
        assert len(prompt) > 16, "more than one step"
        mean = await vector(engine, pooled(prompt))
        last = await vector(engine, pooled(prompt, "last"))
    finally:
        await engine.stop()
    with torch.inference_mode():
        states = smollm_reference.model(torch.tensor([prompt])).last_hidden_state[0]
    np.testing.assert_allclose(mean, states.mean(0).numpy(), atol=1e-4)
    np.testing.assert_allclose(last, states[-1].numpy(), atol=1e-4)
