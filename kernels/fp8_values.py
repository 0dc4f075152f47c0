"""Reads fp8 (e4m3) where there is no instruction for it: on older GPUs, and in torch on a CPU.

Its sign, exponent and mantissa, moved to those of a float16, are 1/256 of the value: exact, subnormals too.
"""

from functools import cache

import torch
from torch import Tensor

from kernels.dispatch import tl, triton

_FP8_SINCE = (8, 9)  # compute capability


@cache
def has_fp8(device: torch.device) -> bool:
    """Return False for a GPU without instructions for fp8."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _FP8_SINCE


def loadable(values: Tensor) -> Tensor:
    """Return values as a kernel can load them on their device: fp8 as uint8 if it has no fp8."""
    is_bits = values.dtype == torch.float8_e4m3fn and not has_fp8(values.device)
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
    if values.dtype != torch.float8_e4m3fn:
        return target.copy_(values)
    bits = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-16385)
    bits |= (bits + 128).bitwise_and_(16384)
    return target.copy_(bits.view(torch.float16)).mul_(256.0)
