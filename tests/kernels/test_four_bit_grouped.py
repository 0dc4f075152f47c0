"""Products of experts with weights of four bits against those with the dequantized weight.

Covers kernels/four_bit_grouped.py.
"""

import pytest
import torch

from kernels.expert_routing import group_by_expert
from kernels.four_bit_grouped import TileShape, four_bit_grouped, four_bit_grouped_triton
from kernels.grouped_linear import GatedActivation, grouped_linear_torch
from tests.kernels.test_four_bit_linear import made, moved
from tests.kernels.tolerances import assert_close

KINDS = [(128, {}), (64, {"asymmetric": True}), (32, {"is_float": True, "scale_dtype": torch.bfloat16})]

ACTIVATIONS = [None, GatedActivation("silu"), GatedActivation("swiglu_clamped", 1.7, 0.5)]


def experts(num_experts, features, size, group_size, **kind):
    """A random weight of experts, and its values in float64."""
    several = [made(features, size, group_size, **kind) for _ in range(num_experts)]
    first = several[0][0]
    zeros = None if first.zeros is None else torch.stack([weight.zeros for weight, _ in several])
    stacked = first._replace(
        values=torch.stack([weight.values for weight, _ in several]),
        scales=torch.stack([weight.scales for weight, _ in several]),
        zeros=zeros,
    )
    return stacked, torch.stack([exact for _, exact in several])


def check(target, dtype, num_tokens, activation, group_size, kind, shape=None):
    if dtype == torch.bfloat16 and target.backend == "triton" and not target.large:
        pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16 matrices")
    num_experts, top_k, features, size = 5, 2, 70, 160
    weight, exact = experts(num_experts, features, size, group_size, **kind)
    weight = moved(weight, target)
    x = torch.randn(num_tokens, size).to(dtype)
    bias = torch.randn(num_experts, features).to(dtype)
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)]).int()
    groups = group_by_expert(*target.to(ids), num_experts)
    op = four_bit_grouped if shape is None else four_bit_grouped_triton
    how = {} if shape is None else {"shape": shape}
    found = op(target.to(x)[0], weight, groups, bias=bias.to(target.device), activation=activation, **how)
    on_cpu = groups._replace(
        expert_ids=ids,
        order=None if groups.order is None else groups.order.cpu(),
        tiles=None if groups.tiles is None else groups.tiles.cpu(),
    )
    expected = grouped_linear_torch(x.double(), exact, on_cpu, bias=bias.double(), activation=activation)
    assert found.dtype == dtype
    assert_close(found, expected, dtype, reduction=size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("group_size", "kind"), KINDS)
@pytest.mark.parametrize("num_tokens", [3, 37])
@pytest.mark.parametrize(
    "activation", [None, GatedActivation("silu"), GatedActivation("swiglu_clamped", 1.7, 0.5)]
)
def test_each_pair_meets_the_weight_of_its_expert(target, dtype, num_tokens, activation, group_size, kind):
    check(target, dtype, num_tokens, activation, group_size, kind)


@pytest.mark.parametrize(
    "target", ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
@pytest.mark.parametrize("weight_left", [True, False])
def test_both_operands_may_be_left(target, weight_left):
    shape = TileShape(32, weight_left, 2, 3)
    check(target, torch.float16, 37, GatedActivation("silu"), 32, {"asymmetric": True}, shape)
