"""Activations in 8 bits: fp8 (e4m3) or int8 values, with a float32 scale for each row or group of a row.

The largest magnitude that shares a scale becomes the largest value of the dtype, 448 or 127. With a scale
given from outside, larger values saturate.

Rows of bfloat16 take 1.8 us on an H200 for 1 x 4096, 2.7 for 1 x 14336, 2.6 for 256 x 4096, 5.4 for
2048 x 4096 and 25 for 2048 x 14336, where adding 1 to one number takes 1.6.
"""

import torch
from torch import Tensor

from kernels.dispatch import dispatch, tl, triton
from kernels.fp8_values import FP8, FP8_MAX

_TILE = 4096  # values of a program that takes several groups
_VALUES_OF_A_THREAD = 32  # with 8 a prefill of 2048 x 4096 takes 1.4 times as long
LIMITS = {FP8: int(FP8_MAX), torch.int8: 127}  # the largest values


@triton.jit
def scale_of(x, axis: tl.constexpr, scale_ptr, HAS_SCALE: tl.constexpr, LIMIT: tl.constexpr):
    """Return the scale of fp32 values that share one along an axis, and its inverse."""
    # The bits of magnitudes are in their order, and those of NaN are above all others.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis)
    scale = tl.load(scale_ptr) if HAS_SCALE else largest.to(tl.float32, bitcast=True) / LIMIT
    scale = tl.where(largest < 0x7F800000, scale, float("nan"))
    # The inverse of a subnormal scale would be infinite.
    return scale, 1.0 / tl.where(scale > 1e-37, scale, 1.0)


@triton.jit
def quantized(x, inverse, TYPE: tl.constexpr, LIMIT: tl.constexpr):
    """Return fp32 values in TYPE, fp8 or int8."""
    y = tl.minimum(tl.maximum(x * inverse, -LIMIT), LIMIT)
    if tl.int8 == TYPE:
        y = (y + 12582912.0) - 12582912.0  # at 1.5 * 2^23 float32 has whole numbers only, ties to even
    return y.to(TYPE)


@triton.jit
def _quantize_kernel(
    x_ptr,
    scale_ptr,
    values_ptr,
    scales_ptr,
    row_size,
    num_groups,
    x_stride,
    GROUP_SIZE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    LIMIT: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row and GROUPS of its groups; BLOCK is the power of two from GROUP_SIZE on."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    place = tl.arange(0, BLOCK)[None, :]
    column = group[:, None] * GROUP_SIZE + place
    there = (column < row_size) & (place < GROUP_SIZE)
    x = tl.load(x_ptr + row * x_stride + column, mask=there, other=0.0).to(tl.float32)
    scale, inverse = scale_of(x, 1, scale_ptr, HAS_SCALE, LIMIT)
    y = quantized(x, inverse[:, None], values_ptr.dtype.element_ty, LIMIT)
    tl.store(values_ptr + row * row_size + column, y, mask=there)
    tl.store(scales_ptr + row * num_groups + group, scale, mask=group < num_groups)


def _quantize_triton(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None, group: int
) -> tuple[Tensor, Tensor]:
    """Return values [m, k] and scales [m, ceil(k / group)]."""
    num_rows, row_size = x.shape
    assert x.stride(1) == 1
    num_groups = triton.cdiv(row_size, group)
    values = torch.empty(num_rows, row_size, dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, num_groups, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return values, scales
    block = triton.next_power_of_2(group)
    groups = min(triton.next_power_of_2(num_groups), max(1, _TILE // block))
    _quantize_kernel[(num_rows, triton.cdiv(num_groups, groups))](
        x,
        scale if scale is not None else scales,
        values,
        scales,
        row_size,
        num_groups,
        x.stride(0),
        GROUP_SIZE=group,
        HAS_SCALE=scale is not None,
        LIMIT=LIMITS[dtype],
        GROUPS=groups,
        BLOCK=block,
        num_warps=min(16, max(1, groups * block // (32 * _VALUES_OF_A_THREAD))),
    )
    return values, scales


def quantize_rows_triton(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    values, scales = _quantize_triton(x, dtype, scale, x.shape[1])
    return values, scales.view(-1)


def quantize_rows_torch(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return x [m, k] as values [m, k] of a dtype, contiguous, and one scale per row, fp32 [m].

    dtype: torch.float8_e4m3fn or torch.int8 (rounded to the nearest, ties to even). scale fp32 [1]: of all
    rows, above 0; None: each row has its own. values * scale is near x. A row of zeros has the scale 0; one
    with NaN or an infinity has the scale NaN, whatever its values are.
    """
    wide = x.float()
    largest = wide.abs().amax(1) if x.shape[1] else wide.new_zeros(len(x))
    limit = LIMITS[dtype]
    scales = torch.where(largest.isfinite(), largest / limit if scale is None else scale, torch.nan)
    wide = (wide * (1.0 / torch.where(scales > 1e-37, scales, 1.0))[:, None]).clamp_(-limit, limit)
    if dtype == torch.int8:
        wide = wide.round_().nan_to_num_(0.0)  # converting NaN is undefined
    return wide.to(dtype), scales


def quantize_groups_triton(x: Tensor, dtype: torch.dtype, group_size: int = 128) -> tuple[Tensor, Tensor]:
    return _quantize_triton(x, dtype, None, group_size)


def quantize_groups_torch(x: Tensor, dtype: torch.dtype, group_size: int = 128) -> tuple[Tensor, Tensor]:
    """Return x [m, k] as `quantize_rows` does, with a scale for each group of a row.

    The scales are fp32 [m, ceil(k / group_size)]; the last group may be smaller.
    """
    num_rows, row_size = x.shape
    num_groups = -(-row_size // group_size)
    padded = torch.nn.functional.pad(x, (0, num_groups * group_size - row_size))
    values, scales = quantize_rows_torch(padded.reshape(-1, group_size), dtype)
    values = values.view(num_rows, num_groups * group_size)[:, :row_size].contiguous()
    return values, scales.view(num_rows, num_groups)


quantize_rows = dispatch(quantize_rows_triton, quantize_rows_torch)
quantize_groups = dispatch(quantize_groups_triton, quantize_groups_torch)
