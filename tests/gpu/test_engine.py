"""The whole engine on a GPU: running ahead changes nothing but the speed."""

import asyncio
import random

import pytest
import torch

from benchmarks.in_process import Recorder, engine_around
from engine.config import EngineConfig
from engine.device.devices import set_up_thread
from engine.device.runner import ModelRunner
from engine.request import Request, SamplingParams
from models.loader import random_decoder
from models.shapes import SHAPES

pytestmark = pytest.mark.gpu

SHAPE = "llama-1b"
NUM_REQUESTS = 48
TOKEN_BUDGET = 2048
LONGEST = 400


@pytest.fixture(scope="module")
def decoder(device):
    """Random weights."""
    with torch.inference_mode():
        return random_decoder(SHAPES[SHAPE], torch.bfloat16, device)


def requests() -> list[Request]:
    """Prompts that need several chunks together, and answers of different lengths, drawn with seeds."""
    rng = random.Random(0)
    ids = range(SHAPES[SHAPE].vocab_size)
    return [
        Request(
            str(index),
            tuple(rng.choices(ids, k=rng.randrange(1, LONGEST))),
            SamplingParams(
                max_tokens=rng.randrange(1, 60), temperature=1.0, top_p=0.9, seed=index, ignore_eos=True
            ),
        )
        for index in range(NUM_REQUESTS)
    ]


async def texts(decoder, run_ahead: int) -> list[str]:
    """What the requests bring when they arrive together."""
    config = EngineConfig(
        device=decoder.device.type,
        kv_tokens=NUM_REQUESTS * (LONGEST + 80),
        max_model_len=LONGEST + 64,
        max_num_seqs=NUM_REQUESTS,
        token_budget=TOKEN_BUDGET,
        run_ahead=run_ahead,
    )

    def make_runner() -> ModelRunner:
        set_up_thread(config, decoder.device)
        return ModelRunner.around(decoder, config, TOKEN_BUDGET, ())

    async with engine_around(SHAPE, config, make_runner, Recorder()) as engine:
        streams = [engine.submit(request) for request in requests()]
        return [delta.text for delta in await asyncio.gather(*(stream.collect() for stream in streams))]


async def test_run_ahead_changes_no_token(decoder):
    """Lengths are known in advance, so both ways have the same rows in every step: no bit may differ."""
    ahead, behind = await texts(decoder, 1), await texts(decoder, 0)
    for index, (one, other) in enumerate(zip(ahead, behind, strict=True)):
        assert one == other, f"request {index} differs"
    assert all(ahead)
