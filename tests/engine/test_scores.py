"""Reward scores of an engine with a tiny checkpoint equal those of transformers."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine import Engine
from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.outputs import FinishReason
from engine.readouts import PooledHidden, PromptLogprobs, Readout, RewardScore
from engine.request import Request, SamplingParams
from tests.engine.toy import VOCAB_SIZE
from tests.engine.toy_engine import toy_engine
from tests.tiny_checkpoint import tiny_classifier, write_model

REWARD_MODEL = tiny_classifier(num_labels=1)
PROMPTS = [tuple((7 * start + i * i) % VOCAB_SIZE for i in range(20 + 9 * start)) for start in range(10)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("reward"), REWARD_MODEL))


def settings(folder: str, **changes: Any) -> EngineConfig:
    usual = {"kv_tokens": 2048, "token_budget": 256, "device": "cpu", "dtype": "float32", "threads": 1}
    return EngineConfig(model=folder, **(usual | changes))


def asking(prompt: Sequence[int], *readouts: Readout, max_tokens: int = 0) -> Request:
    return Request("s", tuple(prompt), SamplingParams(max_tokens=max_tokens), readouts=readouts)


async def scores(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    streams = [engine.submit(asking(prompt, RewardScore())) for prompt in prompts]
    for delta in await asyncio.gather(*(stream.collect() for stream in streams)):
        assert (delta.text, delta.num_tokens, delta.finish_reason) == ("", 0, FinishReason.LENGTH)
    return [stream.readout(RewardScore) for stream in streams]


@torch.inference_mode()
def expected(prompts: Sequence[Sequence[int]], model: Any = REWARD_MODEL) -> np.ndarray:
    """Scores [num_prompts, num_labels] of each prompt alone."""
    return np.stack([model(torch.tensor([list(prompt)])).logits[0].numpy() for prompt in prompts])


@pytest.mark.parametrize(
    "changes",
    [{}, {"token_budget": 16}, {"kv_tokens": 256, "token_budget": 32, "overcommit": 1.0}],
    ids=["whole", "in chunks", "in a small pool"],
)
async def test_scores_alone_and_in_a_batch(folder: str, changes: dict[str, Any]) -> None:
    engine = await Engine.start(settings(folder, **changes))
    try:
        assert engine.model.num_labels == 1
        [alone] = await scores(engine, PROMPTS[-1:])
        assert (alone.shape, alone.dtype) == ((1,), np.float32)
        batch = await scores(engine, PROMPTS)
    finally:
        await engine.stop()
    np.testing.assert_allclose(alone, expected(PROMPTS[-1:])[0], atol=1e-4)
    np.testing.assert_allclose(batch, expected(PROMPTS), atol=1e-4)


async def test_a_prefix_hit_leaves_a_score_as_it_is(folder: str) -> None:
    engine = await Engine.start(settings(folder, page_size=16))
    longer = [PROMPTS[4], (*PROMPTS[4], 5, 6), (*PROMPTS[4][:40], 8)]
    try:
        await scores(engine, PROMPTS[4:5])
        found = []
        for prompt, num_cached in zip(longer, (48, 48, 32), strict=True):
            before = engine.stats().cached_prompt_tokens_total
            found += await scores(engine, [prompt])
            assert engine.stats().cached_prompt_tokens_total - before == num_cached
    finally:
        await engine.stop()
    np.testing.assert_allclose(found, expected(longer), atol=1e-4)


async def test_several_labels(tmp_path: Any) -> None:
    model = tiny_classifier(num_labels=3)
    engine = await Engine.start(settings(str(write_model(tmp_path, model)), quantization="int8"))
    try:
        [found] = await scores(engine, PROMPTS[:1])
    finally:
        await engine.stop()
    assert found.shape == (3,)
    worst = np.abs(found - expected(PROMPTS[:1], model)[0]).max()
    assert 0 < worst < 0.5, "the layers are int8"


async def test_a_model_without_the_head_is_named(folder: str) -> None:
    engine = await Engine.start(settings(folder))
    try:
        for request in (
            asking(PROMPTS[0], max_tokens=1),
            asking(PROMPTS[0], RewardScore(), max_tokens=1),
            asking(PROMPTS[0], PromptLogprobs(0)),
        ):
            with pytest.raises(InvalidRequest, match="score head in place of a language model") as caught:
                engine.submit(request)
            assert caught.value.param == "model"
        stream = engine.submit(asking(PROMPTS[0], PooledHidden("last"), RewardScore()))
        await stream.collect()
        assert stream.readout(PooledHidden).shape == (64,)
        np.testing.assert_allclose(stream.readout(RewardScore), expected(PROMPTS[:1])[0], atol=1e-4)
    finally:
        await engine.stop()
    async with toy_engine() as toy:
        with pytest.raises(InvalidRequest, match="no score head"):
            toy.submit(asking(PROMPTS[0], RewardScore()))
