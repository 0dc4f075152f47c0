"""Readouts: pooled hidden states and prompt logprobs, for prompts cut into any chunks."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine import Engine
from engine.config import EngineConfig
from engine.device import readouts
from engine.device.runner import ModelRunner
from engine.errors import ContextLengthExceeded, EngineError
from engine.outputs import FinishReason, Row, RowReadout, SlotInit, StepPlan
from engine.readouts import READOUTS, PooledHidden, PromptLogprobs
from engine.request import Request, SamplingParams
from tests.engine.toy import reference
from tests.engine.toy_engine import to_text, toy_engine

PROMPT = tuple(range(5, 45))


def pooled(prompt, pooling="mean", **options) -> Request:
    readouts = (PooledHidden(pooling),)
    return Request("e", tuple(prompt), SamplingParams(max_tokens=0), readouts=readouts, **options)


async def vector(engine, request: Request) -> np.ndarray:
    stream = engine.submit(request)
    delta = await stream.collect()
    assert (delta.text, delta.num_tokens, delta.finish_reason) == ("", 0, FinishReason.LENGTH)
    assert stream.num_output_tokens == 0
    return stream.readout(PooledHidden)


def in_chunks(model, pooling: str, *lengths: int) -> np.ndarray:
    """The vector of PROMPT, computed in steps of these lengths beside a sequence that is sampled."""
    config = EngineConfig(device=model.device.type, kv_tokens=256, max_model_len=64, max_num_seqs=4)
    runner = ModelRunner.around(model, config, 64, (3,))
    start = 0
    for step, length in enumerate(lengths):
        init = SlotInit(SamplingParams(max_tokens=0), 0, PROMPT, ()) if step == 0 else None
        pages = ((0, 1, 2),) if step == 0 else ()
        end = start + length
        is_last = end == len(PROMPT)
        first = start if pooling == "mean" else max(start, len(PROMPT) - 1)
        part = RowReadout(PooledHidden(pooling), first, end - first, PROMPT[first + 1 : end + 1], is_last)
        row = Row(7, 0, start, PROMPT[start:end], 0, pages, init, (part,) if first < end else ())
        other_init = SlotInit(SamplingParams(max_tokens=5), 0, (9,), ())
        other = Row(8, 1, 0, (9,), new_pages=((4,),), init=other_init)
        plan = StepPlan.of(step, (other, row))
        output = runner.launch(plan).wait()
        assert sorted(map(len, output.tokens)) == [0, 1], "only the other row is sampled"
        start = end
    [(index, (vector,))] = output.readouts.items()
    assert plan.sequence_ids[index] == 7
    return vector


async def test_requests_of_one_prompt_have_the_same_mean():
    """Samples of one prompt share its pages; a mean needs every token all the same."""
    async with toy_engine() as engine:
        for stream in engine.submit_group([pooled(range(20)) for _ in range(3)]):
            await stream.collect()
            assert stream.readout(PooledHidden).tolist() == [9.5, 20.0]


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
            assert stream.readout(PooledHidden).tolist() == [np.float32(np.mean(prompt)), len(prompt)]
        for i, talker in enumerate(talkers):
            assert (await talker.collect()).text.startswith(to_text(reference([i, i], 40, seed=7))[:-1])
        assert engine.stats().preemptions_total > 0, "the pool is too large for this test"


async def test_a_mean_needs_every_token_and_the_last_state_only_itself():
    async with toy_engine() as engine:
        prompt = list(range(20))
        assert (await vector(engine, pooled(prompt))).tolist() == [9.5, 20.0]
        assert engine.stats().cached_prompt_tokens_total == 0
        assert (await vector(engine, pooled(prompt, "last"))).tolist() == [19.0, 20.0]
        assert engine.stats().cached_prompt_tokens_total == 16, "the pages of the first are found"
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
        with pytest.raises(KeyError):
            stream.readout(PooledHidden)


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


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_a_rank_counts_all_tokens_that_are_as_likely(monkeypatch, rows_at_once: int) -> None:
    """Also of tokens that are not among the most likely ones returned."""
    vocab_size = 50
    monkeypatch.setattr(readouts, "SLICE_BYTES", rows_at_once * 4 * vocab_size)
    logits = torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(5))
    logits[5] = 0.0
    tokens = torch.tensor([0, 1, 2, 3, 4, 5, 6])
    logits[1, 1] = 9.0
    logits[2, 2] = -9.0
    model: Any = SimpleNamespace(spec=SimpleNamespace(vocab_size=vocab_size), logits=lambda states: states)
    columns = readouts.prompt_logprobs(model, logits, tokens)
    chosen, ranks = torch.cat(columns[::4]), torch.cat(columns[3::4])
    order = logits.argsort(-1, descending=True).tolist()
    expected = [row.index(token) + 1 for row, token in zip(order, tokens.tolist(), strict=True)]
    expected[5] = vocab_size  # all are as likely
    assert ranks.tolist() == expected
    assert expected[1:3] == [1, vocab_size]
    torch.testing.assert_close(chosen, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])


def test_results_are_arrays_of_their_rows_in_slices_of_any_size(monkeypatch) -> None:
    """The detokenizer's thread makes objects of them, a prompt's thousands at a time."""
    vocab_size, sizes, num_tops = 30, (4, 2, 3), (3, 0, 20)
    logits = torch.randn(sum(sizes), vocab_size, generator=torch.Generator().manual_seed(6))
    model: Any = SimpleNamespace(spec=SimpleNamespace(vocab_size=vocab_size), logits=lambda states: states)
    for rows_at_once in (1, 4, 100):
        monkeypatch.setattr(readouts, "SLICE_BYTES", rows_at_once * 4 * vocab_size)
        parts = [
            readouts.PlacedReadout(
                row, row, 0, RowReadout(PromptLogprobs(num_top), 0, size, (5,) * size, False)
            )
            for row, (size, num_top) in enumerate(zip(sizes, num_tops, strict=True))
        ]
        pending = readouts.PromptLogprobsRecipe(model, 4).compute(parts, logits)
        results = pending.results([tensor.numpy() for tensor in pending.tensors])
        first = 0
        for size, num_top, columns in zip(sizes, num_tops, results, strict=True):
            assert all(isinstance(column, np.ndarray) for column in columns)
            assert [column.shape for column in columns] == [
                (size,),
                (size, num_top),
                (size, num_top),
                (size,),
            ]
            expected = logits[first : first + size].log_softmax(-1)
            np.testing.assert_allclose(columns.logprobs, expected[:, 5], atol=1e-5)
            np.testing.assert_allclose(columns.top, expected.topk(num_top).values, atol=1e-5)
            first += size


def test_every_readout_has_a_recipe() -> None:
    assert set(READOUTS.values()) == set(readouts.RECIPES)
