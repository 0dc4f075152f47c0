"""y = x Wᵀ (+ b) with a weight of fp8 (e4m3) that has a float32 scale for each block of 128 x 128.

Activations are quantized in groups of 128 inputs of a token, so that all products of a group and a block have
one scale. Hopper's matrix unit adds fp8 products with about 14 bits; its sums of 128 are scaled and added in
float32 (DeepSeek-AI, 2024, DeepSeek-V3). The weight is the left operand of the product: the matrix unit takes
at least 64 rows there, and few tokens waste nothing as the right one. Up to 8 tokens each program quantizes
what it reads of x, which saves the time of a kernel that does it once, 2 µs.

A GPU without fp8 products (compute capability below 8.9) multiplies the activations as they are with the
values of the weight, converted to their dtype by their bits.

Microseconds on an H200 with activations in bfloat16, their quantization included, tiles the fastest of 15 to
44 or within 8 % of it, beside cuBLAS with a bfloat16 weight:

    tokens                                1    16    64   256  2048
    4096 -> 6144      block_linear     10.4  11.9  17.7  29.2   160
                      cuBLAS           15.6  16.3  16.8  20.9   133
    4096 -> 4096      block_linear      8.6   9.6  12.9  18.9   111
                      cuBLAS           13.1  13.6  12.0  18.4    87
    4096 -> 28672     block_linear     34.0  34.2  39.3   106   699
                      cuBLAS           65.2  58.6  63.4  91.4   602
    14336 -> 4096     block_linear     19.3  21.6  29.2  58.1   379
                      cuBLAS           35.8  33.4  37.2  49.1   291
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import dispatch, tl, triton
from kernels.fp8_values import FP8, copy_widened, has_fp8, loadable, widened, widened_rows
from kernels.quantize_rows import LIMITS, quantize_groups, quantize_groups_torch, quantized, scale_of
from kernels.split_sums import MANY_FEATURES, split_inputs, sum_of_splits

BLOCK = 128
_BLOCK = tl.constexpr(BLOCK)
_LIMIT = tl.constexpr(LIMITS[FP8])


class LaunchShape(NamedTuple):
    """Tokens and features of a tile, the parts of the inputs, and how the compiler schedules it.

    quantizes: programs quantize what they read of the activations.
    """

    block_m: int
    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int
    quantizes: bool


def launch_shape(num_tokens: int, out_features: int, in_features: int) -> LaunchShape:
    """Return the launch of a product."""
    few = num_tokens <= 8
    if num_tokens > 64:
        tiles = -(-num_tokens // 128) * -(-out_features // 64)
        return LaunchShape(128, 64, max(1, min(4, 128 // tiles)), 4, 4, False)
    block_m = max(8, triton.next_power_of_2(num_tokens))
    if out_features >= MANY_FEATURES:
        return LaunchShape(block_m, 128, 1, 4, 4, few)
    programs = (512 if num_tokens <= 16 else 256) // -(-out_features // 64)
    splits = max(1, min(8 if few else 4, programs, in_features // 1024))
    return LaunchShape(block_m, 64, splits, 4, 4, few)


@triton.jit(do_not_specialize=["num_tokens", "split_blocks"])
def _block_linear_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_tokens,
    out_features,
    in_features,
    x_stride,
    num_blocks,
    split_blocks,
    SCALE_ROWS: tl.constexpr,
    X_KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per tile of tokens and features, tokens first, and part of the inputs.

    Neighbours share rows of the weight, which are read once for all tokens. X_KIND: "values" with scales
    [num_tokens, num_blocks]; "floats" to quantize; "wide": floats, times the values of the weight as such.
    """
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    feature = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(2) * split_blocks
    end = tl.minimum(first + split_blocks, num_blocks)
    k = tl.arange(0, _BLOCK)
    is_token = token < num_tokens
    # Past the end the last feature again: its results are not stored.
    row = tl.minimum(feature, out_features - 1)
    weight = weight_ptr + row.to(tl.int64)[:, None] * in_features + k[None, :]
    x_row = x_ptr + token.to(tl.int64)[:, None] * x_stride + k[None, :]
    x_scale = x_scale_ptr + token.to(tl.int64)[None, :] * num_blocks
    if SCALE_ROWS % BLOCK_N == 0:
        scale = scale_ptr + tl.program_id(1) * BLOCK_N // SCALE_ROWS * num_blocks
    else:
        scale = scale_ptr + (row // SCALE_ROWS * num_blocks)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # Scales are loaded a block ahead (up to 22 % faster): the compiler pipelines only what products take.
    next_scale = tl.load(scale + first)
    if X_KIND == "values":
        next_of_x = tl.load(x_scale + first, mask=is_token[None, :], other=0.0)
    for block in range(first, end):
        start = block * _BLOCK
        if EVEN_K:
            w = tl.load(weight + start)
            x = tl.load(x_row + start, mask=is_token[:, None], other=0.0)
        else:
            inside = (k < in_features - start)[None, :]
            w = tl.load(weight + start, mask=inside, other=0.0)
            x = tl.load(x_row + start, mask=is_token[:, None] & inside, other=0.0)
        following = tl.minimum(block + 1, num_blocks - 1)
        factor = next_scale
        next_scale = tl.load(scale + following)
        if X_KIND == "values":
            factor = factor * next_of_x
            next_of_x = tl.load(x_scale + following, mask=is_token[None, :], other=0.0)
        elif X_KIND == "floats":
            x = x.to(tl.float32)
            of_x, inverse = scale_of(x, 1, x_ptr, False, _LIMIT)
            x = quantized(x, inverse[:, None], weight_ptr.dtype.element_ty, _LIMIT)
            factor = factor * of_x[None, :]
        else:
            w = widened(w, x.dtype)
        acc += tl.dot(w, tl.trans(x), input_precision="ieee") * factor
    acc, is_last = sum_of_splits(acc, partial_ptr, arrived_ptr, NUM_SPLITS)
    if is_last:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + row).to(tl.float32)[:, None]
        target = out_ptr + token.to(tl.int64)[None, :] * out_features + feature[:, None]
        stored = is_token[None, :] & (feature < out_features)[:, None]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=stored)


def block_linear_triton(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, shape: LaunchShape | None = None
) -> Tensor:
    num_tokens, in_features = x.shape
    out_features, num_blocks = len(weight), scale.shape[1]
    assert x.stride(1) == 1 and weight.is_contiguous() and scale.is_contiguous()
    out = x.new_empty(num_tokens, out_features)
    if num_tokens == 0:
        return out
    shape = shape or launch_shape(num_tokens, out_features, in_features)
    kind, x_scale = "floats", scale
    if not has_fp8(x.device):
        kind, weight = "wide", loadable(weight)
    elif not shape.quantizes:
        kind = "values"
        x, x_scale = quantize_groups(x, FP8, BLOCK)
    grid = (triton.cdiv(num_tokens, shape.block_m), triton.cdiv(out_features, shape.block_n))
    tile_size = shape.block_n * shape.block_m
    splits = split_inputs(shape.num_splits, num_blocks, grid[0] * grid[1], tile_size, torch.float32, x.device)
    _block_linear_kernel[(*grid, splits.num_splits)](
        x,
        x_scale,
        weight,
        scale,
        bias if bias is not None else scale,
        out,
        splits.partial,
        splits.arrived,
        num_tokens,
        out_features,
        in_features,
        x.stride(0),
        num_blocks,
        splits.num_blocks,
        SCALE_ROWS=out_features // len(scale),
        X_KIND=kind,
        HAS_BIAS=bias is not None,
        EVEN_K=in_features % BLOCK == 0,
        NUM_SPLITS=splits.num_splits,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    return out


def block_linear_torch(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `quantized x @ (weight * scale).T + bias`, [num_tokens, out_features] in x's dtype.

    x [num_tokens, in_features]; weight float8_e4m3fn [out_features, in_features]; scale fp32 [out_features /
    r, ceil(in_features / 128)]: of r features each, 1 to 128; bias [out_features] or None.
    """
    values, x_scale = quantize_groups_torch(x, FP8, BLOCK)
    wide = copy_widened(torch.empty(x.shape, device=x.device), values)
    wide *= x_scale.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    return wide_block_linear(wide, weight, scale, bias).to(x.dtype)


def wide_block_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ (weight * scale).T + bias` in float32 for x fp32 [num_tokens, in_features]."""
    out_features, in_features = weight.shape
    rows = out_features // len(scale)
    out = torch.empty(len(x), out_features, dtype=torch.float32, device=x.device)
    for part, wide in widened_rows(weight, rows):
        blocks = scale[part.start // rows : part.stop // rows]
        wide *= blocks.repeat_interleave(rows, 0).repeat_interleave(BLOCK, 1)[:, :in_features]
        product = torch.mm(wide, x.t())
        if bias is not None:
            product += bias[part, None]
        out[:, part] = product.t()
    return out


block_linear = dispatch(block_linear_triton, block_linear_torch)
