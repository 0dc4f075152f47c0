"""MXFP4 experts: values, loading, and faulty shapes.

Covers models/formats/mxfp4.py.
"""

import pytest
import torch

from kernels.four_bit_weight import dequantize
from models.errors import ModelError
from models.formats import stored_format
from models.formats.base import LinearShape, Shard
from tests.models.harness import CPU

MXFP4 = {"quant_method": "mxfp4"}


def value_of(code, exponent):
    """One value by the bits of E2M1: sign, two bits of exponent, one of mantissa."""
    sign, power, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    magnitude = mantissa * 0.5 if power == 0 else (1 + mantissa / 2) * 2.0 ** (power - 1)
    return sign * magnitude * 2.0 ** (exponent - 127)


def one_expert(exponent, blocks):
    """The weights of an expert with one output and one block."""
    shape = LinearShape(32, {"": 1}, num_experts=1)
    weights = stored_format(MXFP4)(MXFP4, torch.float32, CPU, Shard())([], shape)
    weights.fill("0.scales", torch.tensor([[exponent]], dtype=torch.uint8))
    weights.fill("0.blocks", blocks)
    return weights


@pytest.mark.parametrize("exponent", [1, 100, 127, 140, 252])
def test_every_code_and_the_order_of_values(exponent):
    codes = torch.randperm(32) % 16
    blocks = (codes[0::2] | codes[1::2] << 4).to(torch.uint8)[None, None]
    found = dequantize(one_expert(exponent, blocks)._codes._weight.expert(0), torch.float32)
    assert found[0].tolist() == [value_of(code, exponent) for code in codes.tolist()]


@pytest.mark.parametrize("exponent", [253, 254, 255])
def test_a_scale_that_is_no_number(exponent):
    with pytest.raises(ModelError, match="a scale of '0' is not a number"):
        one_expert(exponent, torch.zeros(1, 1, 16, dtype=torch.uint8))


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
    halves = []
    for expert in range(3):
        rows = dequantize(whole._codes._weight.expert(expert), torch.float32)
        for half, part in zip(("gate", "up"), rows.split(5), strict=True):
            blocks, scales = tensors[f"{expert}.{half}.blocks"], tensors[f"{expert}.{half}.scales"]
            exact = [
                value_of(byte >> 4 * high & 15, scale)
                for block, scale in zip(blocks.flatten(0, 1).tolist(), scales.flatten().tolist(), strict=True)
                for byte in block
                for high in (0, 1)
            ]
            assert part.flatten().tolist() == exact
            halves.append(part)
    stack = torch.cat(halves)
    assert 0.02 < stack.std() < 0.5, "random weights keep the variance of their input"


def test_other_linears_are_dense():
    linear = stored_format(MXFP4)(MXFP4, torch.float32, CPU, Shard())("output", LinearShape(6, {"": 4}))
    assert linear.parameters() == {"weight": (4, 6)}


def test_rows_without_whole_blocks_are_refused():
    shape = LinearShape(48, {"": 4}, num_experts=2)
    with pytest.raises(ModelError, match="rows of 48 weights have no whole MXFP4 blocks of 32"):
        stored_format(MXFP4)(MXFP4, torch.float32, CPU, Shard())("layers.0.mlp.down", shape)
