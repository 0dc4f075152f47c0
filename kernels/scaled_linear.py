"""y = (X Wᵀ) * x_scale * weight_scale (+ b), with X and W both of fp8 (e4m3) or both of int8 (W8A8).

The weight is the left operand of the product: the matrix unit takes at least 64 rows there, and few tokens
waste nothing as the right one. Inputs are divided among programs where tiles are few.

Sums of int8 are exact. Hopper's matrix unit adds fp8 products with about 14 bits; the sums of 128 are added
in float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import dispatch, tl, triton
from kernels.fp8_values import copy_widened
from kernels.split_sums import MOST_TILES, arrivals, sum_of_splits

_NUM_PROGRAMS = 256  # about two per multiprocessor
_TILE_BYTES = 2 << 20  # of float32 that the twin widens at a time


class LaunchShape(NamedTuple):
    """Tokens, features and inputs of a tile, the parts of the inputs, and how the compiler schedules it."""

    block_m: int
    block_n: int
    block_k: int
    num_splits: int
    num_warps: int
    num_stages: int


def launch_shape(num_tokens: int, out_features: int, in_features: int) -> LaunchShape:
    """Return the launch of a product."""
    if num_tokens <= 64:
        block_m = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
        tiles = -(-out_features // 64)
        splits = max(1, min(8, _NUM_PROGRAMS // tiles, in_features // 512))
        return LaunchShape(block_m, 64, 256, splits, 4, 4)
    tiles = -(-num_tokens // 128) * -(-out_features // 128)
    return LaunchShape(128, 128, 128, max(1, min(4, _NUM_PROGRAMS // tiles)), 8, 3)


@triton.jit(do_not_specialize=["num_tokens", "split_blocks"])
def _scaled_linear_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_tokens,
    out_features,
    in_features,
    x_stride,
    split_blocks,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per tile of features and tokens, features first, and part of the inputs."""
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(2) * split_blocks * BLOCK_K
    end = tl.minimum(first + split_blocks * BLOCK_K, in_features)
    k = tl.arange(0, BLOCK_K)
    is_token = token < num_tokens
    # Past the end the last feature again: its results are not stored.
    row = tl.minimum(feature, out_features - 1)
    weight = weight_ptr + row.to(tl.int64)[:, None] * in_features + k[None, :]
    x_column = x_ptr + token.to(tl.int64)[None, :] * x_stride + k[:, None]
    IS_INT: tl.constexpr = weight_ptr.dtype.element_ty == tl.int8
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.int32 if IS_INT else tl.float32)
    for start in range(first, end, BLOCK_K):
        if EVEN_K:
            w = tl.load(weight + start)
            x = tl.load(x_column + start, mask=is_token[None, :], other=0.0)
        else:
            inside = k < end - start
            w = tl.load(weight + start, mask=inside[None, :], other=0.0)
            x = tl.load(x_column + start, mask=is_token[None, :] & inside[:, None], other=0.0)
        if IS_INT:
            acc = tl.dot(w, x, acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(w, x, acc, max_num_imprecise_acc=min(128, BLOCK_K))
    acc, is_last = sum_of_splits(acc, partial_ptr, arrived_ptr, NUM_SPLITS)
    if is_last:
        y = acc.to(tl.float32) * tl.load(weight_scale_ptr + row)[:, None]
        y *= tl.load(x_scale_ptr + token, mask=is_token, other=0.0)[None, :]
        if HAS_BIAS:
            y += tl.load(bias_ptr + row).to(tl.float32)[:, None]
        target = out_ptr + token.to(tl.int64)[None, :] * out_features + feature[:, None]
        stored = is_token[None, :] & (feature < out_features)[:, None]
        tl.store(target, y.to(out_ptr.dtype.element_ty), mask=stored)


def scaled_linear_triton(
    values: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    shape: LaunchShape | None = None,
) -> Tensor:
    num_tokens, in_features = values.shape
    out_features = len(weight)
    assert values.stride(1) == 1 and weight.is_contiguous() and values.dtype == weight.dtype
    assert x_scale.is_contiguous() and weight_scale.is_contiguous()
    out = torch.empty(num_tokens, out_features, dtype=dtype, device=values.device)
    if num_tokens == 0:
        return out
    shape = shape or launch_shape(num_tokens, out_features, in_features)
    grid = (triton.cdiv(out_features, shape.block_n), triton.cdiv(num_tokens, shape.block_m))
    num_splits = shape.num_splits if grid[0] * grid[1] <= MOST_TILES else 1
    num_blocks = triton.cdiv(in_features, shape.block_k)
    split_blocks = triton.cdiv(num_blocks, num_splits)
    num_splits = triton.cdiv(num_blocks, split_blocks)
    partial = out
    if num_splits > 1:
        size = num_splits * grid[0] * grid[1] * shape.block_n * shape.block_m
        sums = torch.int32 if weight.dtype == torch.int8 else torch.float32
        partial = torch.empty(size, dtype=sums, device=values.device)
    _scaled_linear_kernel[(*grid, num_splits)](
        values,
        x_scale,
        weight,
        weight_scale,
        bias if bias is not None else weight_scale,
        out,
        partial,
        arrivals(values.device),
        num_tokens,
        out_features,
        in_features,
        values.stride(0),
        split_blocks,
        HAS_BIAS=bias is not None,
        EVEN_K=in_features % shape.block_k == 0,
        NUM_SPLITS=num_splits,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    return out


def scaled_linear_torch(
    values: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return `(values @ weight.T) * x_scale * weight_scale + bias`, [num_tokens, out_features] in dtype.

    values [num_tokens, in_features] and weight [out_features, in_features], both torch.float8_e4m3fn or both
    torch.int8; x_scale fp32 [num_tokens], weight_scale fp32 [out_features], bias [out_features] or None.
    `quantize_rows` returns values and x_scale.
    """
    num_tokens, in_features = values.shape
    wide_x = copy_widened(torch.empty(values.shape, device=values.device), values).t()
    out = torch.empty(num_tokens, len(weight), dtype=dtype, device=values.device)
    step = max(1, min(len(weight), _TILE_BYTES // (4 * in_features)))
    tile = torch.empty(step, in_features, dtype=torch.float32, device=values.device)
    for start in range(0, len(weight), step):
        part = slice(start, min(start + step, len(weight)))
        wide = copy_widened(tile[: part.stop - start], weight[part])
        product = torch.mm(wide, wide_x) * weight_scale[part, None] * x_scale
        if bias is not None:
            product += bias[part, None]
        out[:, part] = product.t()
    return out


scaled_linear = dispatch(scaled_linear_triton, scaled_linear_torch)
