"""MXFP4 experts: values, loading, and faulty shapes.

Covers models/formats/mxfp4.py.
"""

import pytest
import torch

from models.errors import ModelError
from models.formats import stored_format
from models.formats.base import LinearShape, Shard
from models.formats.mxfp4 import dequantize
from tests.models.harness import CPU

MXFP4 = {"quant_method": "mxfp4"}


def value_of(code, exponent):
    """One value by the bits of E2M1: sign, two bits of exponent, one of mantissa."""
    sign, power, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    magnitude = mantissa * 0.5 if power == 0 else (1 + mantissa / 2) * 2.0 ** (power - 1)
    return sign * magnitude * 2.0 ** (exponent - 127)


def test_every_code_and_the_order_of_values():
    codes = torch.randperm(32) % 16
    blocks = (codes[0::2] | codes[1::2] << 4).to(torch.uint8)[None]
    for exponent in (100, 127, 140):
        found = dequantize(blocks, torch.tensor([exponent], dtype=torch.uint8), torch.float32)
        assert found.tolist() == [value_of(code, exponent) for code in codes.tolist()]


@pytest.mark.parametrize("scales_first", [False, True])
def test_parts_of_ranks_are_filled_in_any_order(scales_first):
    shape = LinearShape(64, {"gate": 5, "up": 5}, bias=True, shard="column", num_experts=3)
    torch.manual_seed(0)
    tensors = {}
    make = stored_format(MXFP4)
    whole = make(MXFP4, torch.float32, CPU, Shard())("layers.0.mlp.gate_up", shape)
    for name, size in whole.parameters().items():
        tensors[name] = whole.random(name, torch.Generator().manual_seed(len(tensors)))
        assert tensors[name].shape == size
    names = sorted(tensors, reverse=scales_first)  # "blocks" sorts before "scales"
    for name in names:
        whole.fill(name, tensors[name])
    stack = torch.cat(
        [
            dequantize(tensors[f"{e}.{h}.blocks"], tensors[f"{e}.{h}.scales"], torch.float32)
            for e in range(3)
            for h in ("gate", "up")
        ]
    )
    rows = whole._experts.flatten(0, 1)
    assert torch.equal(rows, stack)
    assert 0.02 < stack.std() < 0.5, "random weights keep the variance of their input"


def test_other_linears_are_dense():
    linear = stored_format(MXFP4)(MXFP4, torch.float32, CPU, Shard())("output", LinearShape(6, {"": 4}))
    assert linear.parameters() == {"weight": (4, 6)}


def test_rows_without_whole_blocks_are_refused():
    shape = LinearShape(48, {"": 4}, num_experts=2)
    with pytest.raises(ModelError, match="rows of 48 weights have no whole MXFP4 blocks of 32"):
        stored_format(MXFP4)(MXFP4, torch.float32, CPU, Shard())("layers.0.mlp.down", shape)
