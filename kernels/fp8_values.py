"""Reads fp8 (e4m3) without an instruction for it, on older GPUs and in torch on a CPU, and widens weights.

Its sign, exponent and mantissa, moved to those of a float16, are 1/256 of the value: exact, subnormals too.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from kernels.dispatch import tl, triton

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
_FP8_SINCE = (8, 9)  # compute capability
_TILE_BYTES = 2 << 20  # of float32 that `widened_rows` writes at a time


@cache
def has_fp8(device: torch.device) -> bool:
    """Return False for a GPU without instructions for fp8."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _FP8_SINCE


def loadable(values: Tensor) -> Tensor:
    """Return values as a kernel can load them on their device: fp8 as uint8 if it has no fp8."""
    is_bits = values.dtype == FP8 and not has_fp8(values.device)
    return values.view(torch.uint8) if is_bits else values


@triton.jit
def widened(values, TYPE: tl.constexpr):
    """Return values in a wider TYPE. Those of uint8 are the bits of fp8."""
    if values.dtype == tl.uint8:
        bits = (values.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -16385  # the sign stays in bit 15
        bits |= (bits + 128) & 16384  # NaN: all bits of exponent and mantissa are ones
        return (bits.to(tl.float16, bitcast=True) * 256.0).to(TYPE)
    return values.to(TYPE)


def copy_widened(target: Tensor, values: Tensor) -> Tensor:
    """Copy values of int8 or fp8 to a float32 tensor of their shape, and return it.

    torch's own conversion takes 2.8 ns for a value of fp8, this 0.4, and that of int8 0.1 (one thread).
    """
    if values.dtype != FP8:
        return target.copy_(values)
    bits = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-16385)
    bits |= (bits + 128).bitwise_and_(16384)
    return target.copy_(bits.view(torch.float16)).mul_(256.0)


def widened_rows(values: Tensor, multiple: int = 1) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the rows of values [n, k] of int8 or fp8, and these rows in float32.

    Slices begin at multiples of `multiple`. One tile has the rows of each slice in turn.
    """
    num_rows, row_size = values.shape
    step = max(1, _TILE_BYTES // (4 * row_size * multiple)) * multiple
    tile = torch.empty(min(step, num_rows), row_size, dtype=torch.float32, device=values.device)
    for start in range(0, num_rows, step):
        part = slice(start, min(start + step, num_rows))
        yield part, copy_widened(tile[: part.stop - start], values[part])
