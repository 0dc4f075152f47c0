"""A CPU's default formats: logits of a request do not depend on how it is computed, bit for bit."""

import asyncio
from pathlib import Path

import pytest

from engine import Engine
from engine.config import EngineConfig
from engine.request import Request, SamplingParams
from kernels.cpu.dot_products import num_lanes
from tests.tiny_checkpoint import tiny_llama, write_model

pytestmark = pytest.mark.skipif(not num_lanes(), reason="needs numba and a CPU with AVX2")

PROMPT_LENGTHS = (1, 17, 40, 65, 130, 180)
NUM_NEW_TOKENS = 60
Answers = list[list[tuple[int, float]]]  # tokens and their logprobs


class Answering:
    """Engines with one model, and the requests they answer."""

    def __init__(self, folder: Path) -> None:
        # With many and small weights, attention is spread over keys and many values are rounded to int8.
        model = tiny_llama(0, hidden_size=256, num_hidden_layers=6, initializer_range=0.1)
        self._model = str(write_model(folder, model))
        self._prompts = [tuple((3 * i * n + i * i) % 90 for i in range(n)) for n in PROMPT_LENGTHS]

    async def answers(
        self, at_once: bool = True, repeats: int = 1, **settings: object
    ) -> tuple[Answers, Engine]:
        """Return what each prompt gets the last time, and the engine."""
        sizes = {"kv_tokens": 2048, "max_num_seqs": 6, "threads": 1}
        config = EngineConfig(model=self._model, device="cpu", quantization="int8", **(sizes | settings))
        engine = await Engine.start(config)
        try:
            assert (engine.model.dtype, engine.model.kv_dtype) == ("float32", "int8")
            for _ in range(repeats):
                if at_once:
                    found = await asyncio.gather(*(self._answer(engine, p) for p in self._prompts))
                else:
                    found = [await self._answer(engine, p) for p in self._prompts]
            return found, engine
        finally:
            await engine.stop()

    async def _answer(self, engine: Engine, prompt: tuple[int, ...]) -> list[tuple[int, float]]:
        sampling = SamplingParams(max_tokens=NUM_NEW_TOKENS, ignore_eos=True, temperature=0.0, logprobs=0)
        delta = await engine.submit(Request("r", prompt, sampling)).collect()
        assert len(delta.tokens) == NUM_NEW_TOKENS
        return [(token.piece.token_id, token.logprob) for token in delta.tokens]


def assert_equal(found: Answers, alone: Answers) -> None:
    for length, one, other in zip(PROMPT_LENGTHS, found, alone, strict=True):
        places = [place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
        assert not places, (
            f"prompt of {length}: token {places[0]} is {one[places[0]]}, not {other[places[0]]}"
        )


async def test_alone_among_others_in_chunks_from_the_cache_and_preempted(tmp_path):
    answering = Answering(tmp_path)
    alone, _ = await answering.answers(at_once=False, prefix_cache=False)
    # Beside a row that decodes, one token is left to a prompt.
    found, _ = await answering.answers(prefix_cache=False, token_budget=2, max_num_seqs=2)
    assert_equal(found, alone)
    # With pages of one token all tokens of a prompt but the last are found.
    found, engine = await answering.answers(repeats=2, page_size=1, threads=2)
    assert engine.stats().cached_prompt_tokens_total > sum(PROMPT_LENGTHS) // 2
    assert_equal(found, alone)
    found, engine = await answering.answers(kv_tokens=352, max_model_len=256, overcommit=1.0, token_budget=16)
    assert engine.stats().preemptions_total > 0
    assert_equal(found, alone)
