"""Covers engine/device/warm_up.py."""

import pytest
import torch

from engine.device import warm_up
from engine.device.kv_cache import KVCache
from kernels.cpu import compiler
from models.loader import random_decoder
from models.shapes import SHAPES

CPU = torch.device("cpu")


@pytest.mark.skipif(not compiler.is_available(), reason="needs numba")
@pytest.mark.parametrize(("max_tokens", "expected"), [(40, 40), (10_000, 63), (0, None)])
def test_a_prompt_that_fits_and_a_decode_step_are_launched(max_tokens, expected):
    model = random_decoder(SHAPES["tiny"], torch.float32, CPU)
    plans = []
    warm_up.compile_kernels(plans.append, model, KVCache.of(model, 4, 16), max_tokens)
    if expected is None:
        assert plans == []
        return
    prompt, decode = plans
    assert (prompt.query_lens, prompt.num_logits, prompt.starts) == ([expected], [1], [0])
    assert prompt.new_pages[0] == (tuple(range(expected // 16 + 1)),)
    assert (decode.query_lens, decode.starts) == ([1], [expected])


def test_a_model_without_compiled_kernels_is_left_alone(monkeypatch):
    monkeypatch.setattr(compiler, "is_available", lambda: False)
    model = random_decoder(SHAPES["tiny"], torch.float32, CPU)
    plans = []
    warm_up.compile_kernels(plans.append, model, KVCache.of(model, 4, 16), 40)
    assert plans == []
