"""Weights of four bits as compressed-tensors packs them, against their dequantized values.

Covers models/formats/pack_quantized.py.
"""

import pytest
import torch

from models.errors import ModelError
from models.formats.base import WHOLE, LinearShape, Shard
from models.formats.int8 import Int8Weights
from models.formats.pack_quantized import scheme
from tests.models.harness import CPU
from tests.models.packed_int_checkpoints import packed_tensors, quantized

ARGS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
MODULES = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]
OUTPUTS = {"q": 37, "k": 13}


def made(args, shape, shard=WHOLE):
    return scheme(args, torch.float32, CPU, shard)(MODULES, shape)


def fill(weights, tensors):
    expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert weights.parameters() == expected
    for name, tensor in tensors.items():
        weights.fill(name, tensor)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("size", "group_size"), [(384, 32), (384, 64), (384, 128), (384, -1), (388, -1)])
@pytest.mark.parametrize("order", [None, "group", "static"])
@pytest.mark.parametrize("bits", [4, 8])
def test_outputs_of_odd_sizes(symmetric, group_size, order, size, bits):
    torch.manual_seed(0)
    args = ARGS | {"symmetric": symmetric, "group_size": group_size, "actorder": order, "num_bits": bits}
    if group_size == -1:
        args |= {"strategy": "channel", "group_size": None}
    weights = made(args, LinearShape(size, OUTPUTS))
    groups = torch.arange(size) // (size if group_size == -1 else group_size)
    if order == "group":
        groups = groups[torch.randperm(size)]
    tensors, values = {}, []
    for name, features in OUTPUTS.items():
        codes, scales, zeros, exact = quantized(
            torch.randn(features, size), group_size, not symmetric, groups, bits
        )
        parts = packed_tensors(
            codes, scales, None if symmetric else zeros, groups if order == "group" else None, bits
        )
        tensors |= {f"{name}.{kind}": tensor for kind, tensor in parts.items()}
        values.append(exact)
    fill(weights, tensors)
    x = torch.randn(3, size)
    torch.testing.assert_close(weights.matmul(x), x @ torch.cat(values).t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("shard", "world"), [("column", 3), ("row", 2)])
def test_ranks_make_the_whole(shard, world):
    torch.manual_seed(0)
    codes, scales, zeros, values = quantized(torch.randn(37, 192), 32, True)
    x, found = torch.randn(5, 192), []
    for rank in (Shard(index, world) for index in range(world)):
        weights = made(ARGS | {"symmetric": False}, LinearShape(192, {"": 37}, shard=shard), rank)
        fill(weights, packed_tensors(codes, scales, zeros, None))
        found.append(weights.matmul(x[:, rank.slice(192)] if shard == "row" else x))
    whole = sum(found) if shard == "row" else torch.cat(found, 1)
    torch.testing.assert_close(whole, x @ values.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("shard", "world"), [("column", 1), ("column", 3), ("row", 2)])
def test_eight_bits_of_rows_stay_int8(shard, world):
    torch.manual_seed(0)
    args = ARGS | {"num_bits": 8, "strategy": "channel", "group_size": None}
    codes, scales, _, values = quantized(torch.randn(37, 191), -1, False, bits=8)
    x, found = torch.randn(5, 191), []
    for rank in (Shard(index, world) for index in range(world)):
        weights = made(args, LinearShape(191, {"": 37}, shard=shard), rank)
        assert isinstance(weights._kept, Int8Weights) and weights.fallback is None
        fill(weights, packed_tensors(codes, scales, None, None, 8))
        found.append(weights.matmul(x[:, rank.slice(191)] if shard == "row" else x))
    whole = sum(found) if shard == "row" else torch.cat(found, 1)
    torch.testing.assert_close(whole, x @ values.t(), rtol=1e-4, atol=1e-4)
    made(args | {"symmetric": False}, LinearShape(191, {"": 37})).fallback.index("kept in float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 2}, "pack-quantized with 2 bits is not supported; 4 and 8 bits are"),
        ({"type": "float"}, "of type 'float' are not supported"),
        ({"strategy": "block"}, "the strategy 'block' is not supported"),
        ({"actorder": "sideways"}, "the order of activations 'sideways' is not known"),
        ({"group_size": 16}, "q_proj, .*k_proj: groups of 16 "),
        ({"group_size": None}, "group_size None makes no sense"),
    ],
)
def test_options_that_are_not_supported(change, message):
    with pytest.raises(ModelError, match=message):
        made(ARGS | change, LinearShape(192, OUTPUTS))


def test_a_shape_that_contradicts():
    codes, scales, _, _ = quantized(torch.randn(37, 192), 32, False)
    tensors = packed_tensors(codes, scales, None, None)
    tensors["weight_shape"] = torch.tensor([37, 200])
    with pytest.raises(ModelError, match=r"weight_shape is \[37, 200\], and there are 192 inputs"):
        fill(made(ARGS, LinearShape(192, {"": 37})), tensors)


def test_random_weights_keep_the_variance_of_their_input():
    args = ARGS | {"symmetric": False, "actorder": "group"}
    weights = made(args, LinearShape(256, {"": 400}))
    for seed, name in enumerate(weights.parameters()):
        weights.fill(name, weights.random(name, torch.Generator().manual_seed(seed)))
    assert 0.8 < weights.matmul(torch.randn(50, 256)).std() < 1.2
