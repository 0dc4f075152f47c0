"""The second product of experts, weighted and summed over each token's experts.

For pairs that are not sorted by expert one kernel does it: a program computes some features of a token by
all of its experts, one after the other, so no result of a single expert reaches memory.
"""

from typing import NamedTuple

import torch

from kernels.dispatch import dispatch, tl, triton
from kernels.expert_routing import ExpertGroups
from kernels.expert_sum import add_shared, expert_sum_torch, expert_sum_triton
from kernels.fp8_values import loadable, widened
from kernels.grouped_linear import grouped_linear_torch, grouped_linear_triton


class MatvecShape(NamedTuple):
    """Features and inputs of a tile, and how the compiler schedules it."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


_SHAPE = MatvecShape(4, 1024, 2, 3)  # the fastest of 54 for Qwen3-30B-A3B's experts on an H200


@triton.jit
def _matvec_sum_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    shared_ptr,
    gate_ptr,
    out_ptr,
    out_features,
    in_features,
    shared_stride,
    gate_stride,
    TOP_K: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per token and block of features."""
    token = tl.program_id(1)
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = feature < out_features
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_N], tl.float32)
    for choice in tl.range(0, TOP_K, num_stages=STAGES):
        pair = token * TOP_K + choice
        row = tl.load(ids_ptr + pair).to(tl.int64) * out_features + feature
        products = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in range(0, in_features, BLOCK_K):
            inside = k < in_features - start
            x = tl.load(x_ptr + pair * in_features + start + k, mask=inside, other=0.0)
            w = tl.load(
                weight_ptr + row[:, None] * in_features + start + k[None, :],
                mask=there[:, None] & inside[None, :],
                other=0.0,
            )
            products += widened(w, tl.float32) * x.to(tl.float32)[None, :]
        result = tl.sum(products, 1)
        if HAS_SCALE:
            result *= tl.load(scale_ptr + row, mask=there, other=0.0)
        if HAS_BIAS:
            result += tl.load(bias_ptr + row, mask=there, other=0.0).to(tl.float32)
        total += result * tl.load(weights_ptr + pair)
    total = add_shared(
        total, shared_ptr, gate_ptr, token, feature, there, shared_stride, gate_stride, HAS_SHARED, HAS_GATE
    )
    tl.store(out_ptr + token * out_features + feature, total.to(out_ptr.dtype.element_ty), mask=there)


def grouped_linear_sum_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: ExpertGroups,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    *,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    shape: MatvecShape = _SHAPE,
) -> torch.Tensor:
    num_tokens, top_k = weights.shape
    if groups.order is not None or num_tokens == 0:
        results = grouped_linear_triton(x, weight, groups, scale=scale, bias=bias)
        return expert_sum_triton(results, weights, shared, shared_gate)
    out_features, in_features = weight.shape[1:]
    assert x.is_contiguous() and weight.is_contiguous()
    assert shared is None or shared.stride(1) == 1
    out = x.new_empty(num_tokens, out_features)
    _matvec_sum_kernel[(triton.cdiv(out_features, shape.block_n), num_tokens)](
        x,
        loadable(weight),
        scale if scale is not None else x,
        bias if bias is not None else x,
        groups.expert_ids,
        weights,
        shared if shared is not None else x,
        shared_gate if shared_gate is not None else x,
        out,
        out_features,
        in_features,
        shared.stride(0) if shared is not None else 0,
        shared_gate.stride(0) if shared_gate is not None else 0,
        TOP_K=top_k,
        HAS_SCALE=scale is not None,
        HAS_BIAS=bias is not None,
        HAS_SHARED=shared is not None,
        HAS_GATE=shared_gate is not None,
        BLOCK_N=shape.block_n,
        BLOCK_K=min(shape.block_k, triton.next_power_of_2(in_features)),
        STAGES=shape.num_stages,
        num_warps=shape.num_warps,
    )
    return out


def grouped_linear_sum_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: ExpertGroups,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    *,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `expert_sum` of what `grouped_linear` returns without an activation, [num_tokens, out_features].

    x [num_pairs, in_features]; weight, scale and bias are those of `grouped_linear`, weights, shared and
    shared_gate those of `expert_sum`.
    """
    results = grouped_linear_torch(x, weight, groups, scale=scale, bias=bias)
    return expert_sum_torch(results, weights, shared, shared_gate)


grouped_linear_sum = dispatch(grouped_linear_sum_triton, grouped_linear_sum_torch)
