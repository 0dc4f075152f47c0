"""y = (X Wᵀ) * x_scale * weight_scale (+ b), with X and W both of fp8 (e4m3) or both of int8 (W8A8).

For few tokens the weight is the left operand of the product: the matrix unit takes at least 64 rows there,
and few tokens waste nothing as the right one. Inputs are divided among programs where tiles are few.

Sums of int8 are exact. Hopper's matrix unit adds fp8 products with about 14 bits; the sums of 128 are added
in float32. For more than 128 tokens and results in bfloat16 torch's product with scales of rows (CUTLASS)
multiplies fp8. It is 1.2 to 1.6 times as fast as this kernel, and does not do that: to an error of 2.6 % of
the results' norm, by quantization, it adds one of 0.13 % for 4096 inputs and of 0.28 % for 14336.

Microseconds on an H200, tiles the fastest of about 30, beside cuBLAS with bfloat16:

    tokens                          1     16     64    128    256   2048
    4096 -> 6144     fp8         10.2   10.3   11.5   13.9   14.8   71.5
                     int8        10.2   10.3   11.5   13.9   16.9   79.3
                     bfloat16    17.0   15.9   16.4   16.9   21.7    132
    4096 -> 4096     fp8          8.2    8.2    9.7   12.4   14.3   48.8
                     int8         8.5    8.2    9.8   12.5   15.1   52.8
                     bfloat16    14.2   13.1   12.1   14.0   16.6   87.2
    4096 -> 28672    fp8         31.0   31.6   34.0   45.2   50.4    320
                     int8        30.7   31.8   34.9   44.9   67.1    480
                     bfloat16    56.4   59.1   63.0   68.7   92.3    608
    14336 -> 4096    fp8         18.2   18.4   22.3   29.4   37.6    161
                     int8        19.7   20.1   22.4   29.2   45.6    165
                     bfloat16    31.5   32.4   35.8   37.2   48.0    293
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import dispatch, tl, triton
from kernels.fp8_values import FP8, copy_widened, loadable, widened, widened_rows
from kernels.split_sums import MANY_FEATURES, split_inputs, sum_of_splits

_MOST_OWN_TOKENS = 128  # for more tokens the vendor's product of fp8 is faster


class LaunchShape(NamedTuple):
    """Tokens, features and inputs of a tile, the left operand, the parts of the inputs, and the schedule."""

    block_m: int
    block_n: int
    block_k: int
    weight_left: bool
    num_splits: int
    num_warps: int
    num_stages: int


def launch_shape(num_tokens: int, out_features: int, in_features: int) -> LaunchShape:
    """Return the launch of a product."""
    block_m = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    many = out_features >= MANY_FEATURES
    if num_tokens <= 128:
        if many:
            return LaunchShape(128 if num_tokens > 64 else block_m, 128, 128, True, 1, 8, 4)
        tiles = -(-out_features // 64) * (1 if num_tokens <= 64 else 2)
        programs = 256 if num_tokens <= 32 or in_features > 8192 else 128
        splits = max(1, min(8, round(programs / tiles)))
        return LaunchShape(block_m, 64, 128, True, splits, 4, 5 if num_tokens <= 64 else 4)
    if many:
        return LaunchShape(256, 128, 128, True, 1, 8, 4)
    if num_tokens <= 512:
        return LaunchShape(128, 64, 128, True, 1, 4, 4)
    return LaunchShape(128, 128, 128, True, 1, 8, 3)


@triton.jit
def product(left, right, acc):
    """Return left @ right + acc: exact for int8, at fp32 precision for fp32."""
    if acc.dtype == tl.int32:
        acc = tl.dot(left, right, acc, out_dtype=tl.int32)
    elif left.dtype.primitive_bitwidth == 8:
        acc = tl.dot(left, right, acc, max_num_imprecise_acc=128)
    else:
        acc = tl.dot(left, right, acc, input_precision="ieee")
    return acc


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
    WEIGHT_LEFT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per tile of features and tokens, features first, and part of the inputs.

    x of 16 or 32 bits has no scale, and weights are converted to its dtype.
    """
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(2) * split_blocks * BLOCK_K
    end = tl.minimum(first + split_blocks * BLOCK_K, in_features)
    k = tl.arange(0, BLOCK_K)
    is_token = token < num_tokens
    # Past the end the last feature again: its results are not stored.
    row = tl.minimum(feature, out_features - 1)
    weight = weight_ptr + row.to(tl.int64)[:, None] * in_features + k[None, :]
    x_row = x_ptr + token.to(tl.int64)[:, None] * x_stride + k[None, :]
    IS_WIDE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth > 8
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros([BLOCK_N, BLOCK_M], SUM) if WEIGHT_LEFT else tl.zeros([BLOCK_M, BLOCK_N], SUM)
    for start in range(first, end, BLOCK_K):
        if EVEN_K:
            w = tl.load(weight + start)
            x = tl.load(x_row + start, mask=is_token[:, None], other=0.0)
        else:
            inside = k < end - start
            w = tl.load(weight + start, mask=inside[None, :], other=0.0)
            x = tl.load(x_row + start, mask=is_token[:, None] & inside[None, :], other=0.0)
        if IS_WIDE:
            w = widened(w, x.dtype)
        acc = product(w, tl.trans(x), acc) if WEIGHT_LEFT else product(x, tl.trans(w), acc)
    acc, is_last = sum_of_splits(acc, partial_ptr, arrived_ptr, NUM_SPLITS)
    if is_last:
        y = acc.to(tl.float32)
        if WEIGHT_LEFT:
            y = tl.trans(y)
        y *= tl.load(weight_scale_ptr + row)[None, :]
        if not IS_WIDE:
            y *= tl.load(x_scale_ptr + token, mask=is_token, other=0.0)[:, None]
        if HAS_BIAS:
            y += tl.load(bias_ptr + row).to(tl.float32)[None, :]
        target = out_ptr + token.to(tl.int64)[:, None] * out_features + feature[None, :]
        stored = is_token[:, None] & (feature < out_features)[None, :]
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
    assert values.dtype == weight.dtype and x_scale.is_contiguous()
    if shape is None and len(values) > _MOST_OWN_TOKENS and _vendor_multiplies(values, weight, dtype):
        scales = x_scale[:, None], weight_scale[None]
        return torch._scaled_mm(values, weight.t(), *scales, bias, out_dtype=dtype, use_fast_accum=True)
    shape = shape or launch_shape(len(values), *weight.shape)
    return launch(values, x_scale, weight, weight_scale, bias, dtype, shape)


def _vendor_multiplies(values: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Return True if torch has a product of these matrices with scales of rows."""
    is_fp8 = values.dtype == FP8 and dtype == torch.bfloat16
    is_aligned = values.is_contiguous() and not (weight.shape[0] % 16 or weight.shape[1] % 16)
    return is_fp8 and is_aligned and values.is_cuda and _is_hopper(values.device)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def launch(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    shape: LaunchShape,
) -> Tensor:
    """Launch the kernel; without x_scale x is of 16 or 32 bits."""
    num_tokens, in_features = x.shape
    out_features = len(weight)
    assert x.stride(1) == 1 and weight.is_contiguous() and weight_scale.is_contiguous()
    out = torch.empty(num_tokens, out_features, dtype=dtype, device=x.device)
    if num_tokens == 0:
        return out
    grid = (triton.cdiv(out_features, shape.block_n), triton.cdiv(num_tokens, shape.block_m))
    num_blocks, tile_size = triton.cdiv(in_features, shape.block_k), shape.block_n * shape.block_m
    sums = torch.int32 if x.dtype == torch.int8 else torch.float32
    splits = split_inputs(shape.num_splits, num_blocks, grid[0] * grid[1], tile_size, sums, x.device)
    _scaled_linear_kernel[(*grid, splits.num_splits)](
        x,
        x_scale if x_scale is not None else weight_scale,
        loadable(weight) if x_scale is None else weight,
        weight_scale,
        bias if bias is not None else weight_scale,
        out,
        splits.partial,
        splits.arrived,
        num_tokens,
        out_features,
        in_features,
        x.stride(0),
        splits.num_blocks,
        HAS_BIAS=bias is not None,
        EVEN_K=in_features % shape.block_k == 0,
        WEIGHT_LEFT=shape.weight_left,
        NUM_SPLITS=splits.num_splits,
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
    wide_x = copy_widened(torch.empty(values.shape, device=values.device), values).t()
    out = torch.empty(len(values), len(weight), dtype=dtype, device=values.device)
    for part, wide in widened_rows(weight):
        product = torch.mm(wide, wide_x) * weight_scale[part, None] * x_scale
        if bias is not None:
            product += bias[part, None]
        out[:, part] = product.t()
    return out


scaled_linear = dispatch(scaled_linear_triton, scaled_linear_torch)
