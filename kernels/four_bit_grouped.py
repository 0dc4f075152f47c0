"""y = x W[e]ᵀ (+ b[e]) with four-bit weights of each row's expert, and the gated activation of the products.

The products of `grouped_linear` with the tiles of `four_bit_weight`. Up to 32 rows of a tile the weight is
the left operand, in registers.

Microseconds of the gate and up projections on an H200 beside bfloat16, by tokens:

    tokens                                  1     4    16    64   256  2048
    gpt-oss-20b (MXFP4)     four bits      42    75   144   161   317  1261
                            bfloat16       40   101   225   258   269   594
    Qwen3-30B-A3B (int4)    four bits      14    26    60    86   132   677
                            bfloat16       15    49   132   184   195   278
"""

from typing import NamedTuple

from torch import Tensor

from kernels.dispatch import dispatch, tl, triton
from kernels.expert_routing import ExpertGroups, pairs_of_tile
from kernels.four_bit_linear import four_bit_linear_torch
from kernels.four_bit_weight import TILE_INPUTS, FourBitWeight, constants, tile_sums
from kernels.grouped_linear import GatedActivation, gated, gated_torch, tiles_of


class TileShape(NamedTuple):
    """Features of a tile, the left operand, and how the compiler schedules it."""

    block_n: int
    weight_left: bool
    num_warps: int
    num_stages: int


def tile_shape(block_m: int, itemsize: int) -> TileShape:
    """Return the tile for a number of rows and the bytes of an activation."""
    if itemsize == 4:  # exact fp32 products use no matrix unit; small accumulators stay in registers
        return TileShape(32, True, 4, 2)
    if block_m <= 16:
        return TileShape(32, True, 2, 3)
    if block_m <= 32:
        return TileShape(64, True, 4, 3)
    return TileShape(128 if block_m <= 64 else 64, False, 4, 3)


@triton.jit(do_not_specialize=["max_tiles"])
def _four_bit_grouped_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    zeros_ptr,
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
    num_rows,
    expert_values,
    expert_scales,
    alpha,
    limit,
    GROUP_SIZE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    USE_PTX: tl.constexpr,
    SORTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WEIGHT_LEFT: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per block of features and tile of pairs, features first: neighbours share rows of x.

    `out_features` counts the results: with an activation an expert's weight has twice as many rows.
    """
    expert, pair, there, count = pairs_of_tile(
        ids_ptr, order_ptr, tiles_ptr, max_tiles, tl.program_id(1), SORTED, BLOCK_M
    )
    if count == 0:
        return
    GATED: tl.constexpr = ACTIVATION != ""
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the end the last feature again: its results are not stored.
    row = tl.minimum(feature, out_features - 1)
    x_row = x_ptr + (pair // pairs_per_row).to(tl.int64) * x_stride
    values = values_ptr + expert * expert_values
    scales = scales_ptr + expert * expert_scales
    zeros = zeros_ptr + expert * expert_scales
    num_tiles = tl.cdiv(in_features, 128)
    if WEIGHT_LEFT:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_acc = acc
    acc = tile_sums(
        acc, x_row, there, values, scales, zeros, row, 0, num_tiles, in_features, num_rows,
        GROUP_SIZE, HAS_ZEROS, IS_FLOAT, WEIGHT_LEFT, WEIGHT_LEFT, EVEN_K, USE_PTX,
    )  # fmt: skip
    if GATED:
        up_acc = tile_sums(
            up_acc, x_row, there, values, scales, zeros, row + out_features, 0, num_tiles, in_features,
            num_rows, GROUP_SIZE, HAS_ZEROS, IS_FLOAT, WEIGHT_LEFT, WEIGHT_LEFT, EVEN_K, USE_PTX,
        )  # fmt: skip
    if WEIGHT_LEFT:
        acc = tl.trans(acc)
        up_acc = tl.trans(up_acc)
    if HAS_BIAS:
        first_bias = bias_ptr + expert * (2 * out_features if GATED else out_features)
        acc += tl.load(first_bias + row).to(tl.float32)[None, :]
        if GATED:
            up_acc += tl.load(first_bias + out_features + row).to(tl.float32)[None, :]
    if GATED:
        acc = gated(acc, up_acc, alpha, limit, ACTIVATION)
    target = out_ptr + pair.to(tl.int64)[:, None] * out_features + feature[None, :]
    stored = there[:, None] & (feature < out_features)[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=stored)


def four_bit_grouped_triton(
    x: Tensor,
    weight: FourBitWeight,
    groups: ExpertGroups,
    *,
    bias: Tensor | None = None,
    activation: GatedActivation | None = None,
    shape: TileShape | None = None,
) -> Tensor:
    num_rows, in_features = x.shape
    assert x.stride(1) == 1 and weight.values.is_contiguous() and weight.scales.is_contiguous()
    out_features = weight.out_features if activation is None else weight.out_features // 2
    num_pairs = groups.expert_ids.numel()
    out = x.new_empty(num_pairs, out_features)
    if num_pairs == 0:
        return out
    block_m = max(16, groups.tile_rows)
    shape = shape or tile_shape(block_m, x.element_size())
    _four_bit_grouped_kernel[(triton.cdiv(out_features, shape.block_n), groups.max_tiles)](
        x,
        weight.values,
        weight.scales,
        weight.zeros if weight.zeros is not None else weight.scales,
        bias if bias is not None else x,
        out,
        *groups.pointers(),
        groups.max_tiles,
        num_pairs // num_rows,
        out_features,
        in_features,
        x.stride(0),
        weight.scales.stride(1),
        weight.values.stride(0),
        weight.scales.stride(0),
        activation.alpha if activation is not None else 0.0,
        activation.limit if activation is not None else 0.0,
        **constants(weight, x),
        SORTED=groups.order is not None,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation.kind if activation is not None else "",
        WEIGHT_LEFT=shape.weight_left,
        EVEN_K=in_features % TILE_INPUTS == 0,
        BLOCK_M=block_m,
        BLOCK_N=shape.block_n,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    return out


def four_bit_grouped_torch(
    x: Tensor,
    weight: FourBitWeight,
    groups: ExpertGroups,
    *,
    bias: Tensor | None = None,
    activation: GatedActivation | None = None,
) -> Tensor:
    """Return for each pair its row of x times its expert's weight, [num_pairs, out_features] in x's dtype.

    x [num_tokens or num_pairs, in_features]; weight that of all experts; the rest as in `grouped_linear`.
    """
    num_pairs = groups.expert_ids.numel()
    pairs_per_row = num_pairs // max(1, x.shape[0])
    out = x.new_empty(num_pairs, weight.out_features if activation is None else weight.out_features // 2)
    for expert, pairs in tiles_of(groups):
        added = None if bias is None else bias[expert]
        product = four_bit_linear_torch(x[pairs // pairs_per_row], weight.expert(expert), added)
        out[pairs] = product if activation is None else gated_torch(product, activation)
    return out


four_bit_grouped = dispatch(four_bit_grouped_triton, four_bit_grouped_torch)
