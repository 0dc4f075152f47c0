"""y = x W[e]ᵀ (+ b[e]) with the weight of each row's expert, and the gated activation of the products.

A grouped matrix product (Gale et al., 2023, MegaBlocks): rows are gathered by expert, and each tile of them
meets one expert's weight. The grid depends on the sizes alone, so a CUDA graph can replay it with any
routing; programs of unused tiles leave at once.

On an H200 with Qwen3-30B-A3B's experts (128 of 2048 x 768, 8 for each token, bf16), microseconds and the
share of the copy bandwidth, tiles the fastest of about 30 (`benchmarks.experts --tune`):

    tokens                      1          16          64         256
    gate and up      16.2 (73 %)  119 (93 %)  178 (97 %)  189 (95 %)
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from kernels.act_mul import activate, gelu_mul_torch, gelu_tanh_mul_torch, silu_mul_torch
from kernels.block_linear import BLOCK, wide_block_linear
from kernels.dispatch import dispatch, tl, triton
from kernels.eight_bit_linear import eight_bit_linear_torch
from kernels.expert_routing import ExpertGroups, pairs_of_tile
from kernels.fp8_values import loadable, widened
from kernels.linear import unpacked_linear

_BLOCK = tl.constexpr(BLOCK)
_ACTIVATIONS = {"silu": silu_mul_torch, "gelu": gelu_mul_torch, "gelu_tanh": gelu_tanh_mul_torch}


class GatedActivation(NamedTuple):
    """The activation `act(gate) * up` of the two halves of a product, the gate's rows first.

    "swiglu_clamped" is that of gpt-oss: gate and up are bounded to `limit`, up from below, too; then
    `gate * sigmoid(alpha * gate) * (up + 1)`.
    """

    kind: Literal["silu", "gelu", "gelu_tanh", "swiglu_clamped"]
    alpha: float = 1.0
    limit: float = 0.0


class TileShape(NamedTuple):
    """Features and inputs of a tile, and how the compiler schedules it."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def tile_shape(block_m: int, itemsize: int, gated: bool) -> TileShape:
    """Return the tile for a number of rows, the bytes of an activation, and one product or two halves."""
    if itemsize == 4:  # exact fp32 products use no matrix unit; small accumulators stay in registers
        return TileShape(32, 32, 4, 2)
    if block_m <= 16:
        return TileShape(64, 128, 4, 4) if gated else TileShape(128, 128, 4, 3)
    if block_m <= 32:
        return TileShape(128, 128, 4, 3)
    if block_m <= 64:
        return TileShape(64, 64, 4, 3) if gated else TileShape(128, 64, 4, 4)
    return TileShape(128, 64, 8, 4) if gated else TileShape(256, 64, 8, 3)


@triton.jit
def gated(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """Return the activation of the two halves of a product, in fp32."""
    if ACTIVATION == "swiglu_clamped":
        gate = tl.minimum(gate, limit)
        up = tl.maximum(tl.minimum(up, limit), -limit) + 1.0
        return gate * tl.sigmoid(alpha * gate) * up
    return activate(gate, ACTIVATION) * up


@triton.jit(do_not_specialize=["max_tiles"])
def _grouped_linear_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    ids_ptr,
    order_ptr,
    tiles_ptr,
    max_tiles,
    pairs_per_row,
    out_features,
    in_features,
    x_stride,
    num_blocks,
    alpha,
    limit,
    SORTED: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per block of features and tile of pairs, features first: neighbours share rows of x.

    `out_features` counts the results: with an activation an expert's weight has twice as many rows. With
    SCALE_ROWS above 0 that many rows share `num_blocks` scales, one for 128 inputs each.
    """
    expert, pair, there, count = pairs_of_tile(
        ids_ptr, order_ptr, tiles_ptr, max_tiles, tl.program_id(1), SORTED, BLOCK_M
    )
    if count == 0:
        return
    GATED: tl.constexpr = ACTIVATION != ""
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = feature < out_features
    # Past the end the last feature again: its results are not stored.
    weight_row = tl.minimum(feature, out_features - 1)
    first_row = expert * (2 * out_features if GATED else out_features)
    k = tl.arange(0, BLOCK_K)
    weight = weight_ptr + (first_row + weight_row)[:, None] * in_features + k[None, :]
    up_weight = weight_ptr + (first_row + out_features + weight_row)[:, None] * in_features + k[None, :]
    if SCALE_ROWS:
        scale = scale_ptr + (first_row + weight_row) // SCALE_ROWS * num_blocks
        up_scale = scale_ptr + (first_row + out_features + weight_row) // SCALE_ROWS * num_blocks
    x_row = x_ptr + (pair // pairs_per_row).to(tl.int64)[:, None] * x_stride + k[None, :]
    is_pair = there[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, in_features, BLOCK_K):
        if EVEN_K:
            w = tl.load(weight + start)
            x = tl.load(x_row + start, mask=is_pair, other=0.0)
            if GATED:
                up_w = tl.load(up_weight + start)
        else:
            inside = (k < in_features - start)[None, :]
            w = tl.load(weight + start, mask=inside, other=0.0)
            x = tl.load(x_row + start, mask=is_pair & inside, other=0.0)
            if GATED:
                up_w = tl.load(up_weight + start, mask=inside, other=0.0)
        if SCALE_ROWS:
            block = start // _BLOCK
            sums = tl.dot(x, tl.trans(widened(w, x.dtype)), input_precision="ieee")
            acc += sums * tl.load(scale + block)[None, :]
            if GATED:
                sums = tl.dot(x, tl.trans(widened(up_w, x.dtype)), input_precision="ieee")
                up_acc += sums * tl.load(up_scale + block)[None, :]
        else:
            acc = tl.dot(x, tl.trans(widened(w, x.dtype)), acc, input_precision="ieee")
            if GATED:
                up_acc = tl.dot(x, tl.trans(widened(up_w, x.dtype)), up_acc, input_precision="ieee")
    if HAS_SCALE:
        acc *= tl.load(scale_ptr + first_row + weight_row)[None, :]
        if GATED:
            up_acc *= tl.load(scale_ptr + first_row + out_features + weight_row)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + first_row + weight_row).to(tl.float32)[None, :]
        if GATED:
            up_acc += tl.load(bias_ptr + first_row + out_features + weight_row).to(tl.float32)[None, :]
    if GATED:
        acc = gated(acc, up_acc, alpha, limit, ACTIVATION)
    target = out_ptr + pair.to(tl.int64)[:, None] * out_features + feature[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=is_pair & inside_n[None, :])


def grouped_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: ExpertGroups,
    *,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: GatedActivation | None = None,
    shape: TileShape | None = None,
) -> torch.Tensor:
    num_rows, in_features = x.shape
    assert x.stride(1) == 1 and weight.is_contiguous()
    out_features = weight.shape[1] if activation is None else weight.shape[1] // 2
    num_pairs = groups.expert_ids.numel()
    out = x.new_empty(num_pairs, out_features)
    if num_pairs == 0:
        return out
    scale_rows = num_blocks = 0
    if scale is not None and scale.ndim == 3:
        scale_rows, num_blocks = weight.shape[1] // scale.shape[1], scale.shape[2]
    block_m = max(16, groups.tile_rows)
    shape = shape or tile_shape(block_m, x.element_size(), activation is not None)
    _grouped_linear_kernel[(triton.cdiv(out_features, shape.block_n), groups.max_tiles)](
        x,
        loadable(weight),
        scale if scale is not None else x,
        bias if bias is not None else x,
        out,
        *groups.pointers(),
        groups.max_tiles,
        num_pairs // num_rows,
        out_features,
        in_features,
        x.stride(0),
        num_blocks,
        activation.alpha if activation is not None else 0.0,
        activation.limit if activation is not None else 0.0,
        SORTED=groups.order is not None,
        HAS_SCALE=scale is not None and not scale_rows,
        SCALE_ROWS=scale_rows,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation.kind if activation is not None else "",
        EVEN_K=in_features % shape.block_k == 0,
        BLOCK_M=block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    return out


def grouped_linear_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: ExpertGroups,
    *,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: GatedActivation | None = None,
) -> torch.Tensor:
    """Return for each pair its row of x times its expert's weight, [num_pairs, out_features] in x's dtype.

    x [num_tokens or num_pairs, in_features]; weight [num_experts, n, in_features] in x's dtype, or int8 or
    fp8 with `scale` fp32 [num_experts, n], or [num_experts, n / r, ceil(in_features / 128)] of r rows and 128
    inputs each; bias [num_experts, n] or None. With an activation the two halves of n become one:
    out_features = n / 2. Sums are fp32.
    """
    num_pairs = groups.expert_ids.numel()
    pairs_per_row = num_pairs // max(1, x.shape[0])
    out_features = weight.shape[1] if activation is None else weight.shape[1] // 2
    out = x.new_empty(num_pairs, out_features)
    for expert, pairs in tiles_of(groups):
        rows = x[pairs // pairs_per_row]
        added = None if bias is None else bias[expert]
        if scale is not None and scale.ndim == 3:
            product = wide_block_linear(rows.float(), weight[expert], scale[expert], added).to(x.dtype)
        elif scale is None:
            product = unpacked_linear(rows, weight[expert], added)
        else:
            product = eight_bit_linear_torch(rows, weight[expert], scale[expert], added)
        out[pairs] = product if activation is None else gated_torch(product, activation)
    return out


def tiles_of(groups: ExpertGroups) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the expert and the pairs of each tile that is used."""
    if groups.order is None or groups.tiles is None:
        for pair, expert in enumerate(groups.expert_ids.flatten().tolist()):
            yield expert, torch.tensor([pair], device=groups.expert_ids.device)
        return
    for expert, first, count in groups.tiles.T.tolist():
        if count:
            yield expert, groups.order[first : first + count]


def gated_torch(gate_up: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    """Return the activation of gate_up [n, 2 * features], the gate first: [n, features]."""
    if activation.kind != "swiglu_clamped":
        return _ACTIVATIONS[activation.kind](gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit) + 1
    return gate * torch.sigmoid(activation.alpha * gate) * up


grouped_linear = dispatch(grouped_linear_triton, grouped_linear_torch)
