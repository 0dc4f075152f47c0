"""Covers engine/device/warm_up.py."""

import pytest
import torch

from engine.device import warm_up
from kernels.cpu import compiler
from models.loader import random_decoder
from models.shapes import SHAPES


@pytest.mark.skipif(not compiler.is_available(), reason="needs numba")
@pytest.mark.parametrize("kv_dtype", ["auto", "bfloat16"])
def test_a_decode_step_and_a_prompt_are_computed(kv_dtype):
    model = random_decoder(SHAPES["tiny"], torch.float32, torch.device("cpu"), quantization="int8")
    steps = []
    body = model.body
    model.body = lambda batch, kv: steps.append(len(batch.positions)) or body(batch, kv)
    warm_up.compile_kernels(model, 16, kv_dtype, token_budget=40)
    assert steps == [1, 40]


def test_a_model_without_compiled_kernels_is_left_alone():
    model = random_decoder(SHAPES["tiny"], torch.bfloat16, torch.device("cpu"))
    model.body = None
    warm_up.compile_kernels(model, 16, "auto", token_budget=40)
