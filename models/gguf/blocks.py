"""Unpacks GGUF blocks to integers and their scales, from which floats or another format are made.

A block holds groups of 16 or 32 small integers; the values of a group share a scale, in some types also an
offset. Layouts as in ggml's `ggml-common.h`; MXFP4 also in the OCP Microscaling Formats specification (2023).
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from torch import Tensor


class Groups(NamedTuple):
    """Values in groups: value = code * scale + offset, in this order of float32 roundings.

    `codes`: int8 [num_groups, 16 or 32]. `scales`, `offsets`: float32 [num_groups, 1]; no offsets: all 0.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None


def unpack(raw: Tensor, kind: Type) -> Groups:
    """Return the groups of whole blocks, `raw` uint8 [rows, row_bytes], of a type in BLOCK_TYPES."""
    return _UNPACK[kind](raw.view(-1, GGML_QUANT_SIZES[kind][1]))


def _half(raw: Tensor) -> Tensor:
    """Return float32 [blocks, 1] from the two bytes of a float16. Blocks need not be aligned: copy first."""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor, run: int) -> Tensor:
    """Return halves of bytes, uint8 [blocks, values]: the low ones of a run of bytes, then the high ones."""
    runs = raw.contiguous().view(raw.shape[0], -1, run)
    return torch.stack((runs & 15, runs >> 4), 2).view(raw.shape[0], -1)


def _fields(raw: Tensor, bits: int, run: int) -> Tensor:
    """Return the fields of 1 or 2 bits of bytes, uint8 [blocks, values].

    Of a run of bytes the lowest fields come first, then the next.
    """
    fields = raw.view(raw.shape[0], -1, 1, run) >> _shifts(bits, run, raw.device)
    return fields.bitwise_and_((1 << bits) - 1).view(raw.shape[0], -1)


@cache
def _shifts(bits: int, run: int, device: torch.device) -> Tensor:
    """Return [8 / bits, run] shifts. Repeated along the run they make a vectorised shift 3 times as fast."""
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)[:, None].expand(-1, run).contiguous()


def _signed(codes: Tensor, zero: int) -> Tensor:
    """Return the codes minus the one that means 0, as int8."""
    return codes.sub_(zero).view(torch.int8)


def _groups(codes: Tensor, scales: Tensor, offsets: Tensor | None = None) -> Groups:
    """Return the groups of blocks with codes [blocks, values], scales and offsets [blocks, groups]."""
    codes = codes.view(torch.int8).view(scales.numel(), -1)
    return Groups(codes, scales.view(-1, 1), None if offsets is None else offsets.view(-1, 1))


def _q4_0(b: Tensor) -> Groups:
    """32 values: float16 scale, 16 bytes of nibbles that mean -8 to 7."""
    return _groups(_signed(_nibbles(b[:, 2:], 16), 8), _half(b[:, :2]))


def _q4_1(b: Tensor) -> Groups:
    """32 values: float16 scale and minimum, 16 bytes of nibbles."""
    return _groups(_nibbles(b[:, 4:], 16), _half(b[:, :2]), _half(b[:, 2:4]))


def _with_fifth_bits(nibbles: Tensor, bits: Tensor) -> Tensor:
    return nibbles.bitwise_or_(bits << 4)


def _q5_0(b: Tensor) -> Groups:
    """32 values: float16 scale, 32 fifth bits, 16 bytes of nibbles; together they mean -16 to 15."""
    codes = _with_fifth_bits(_nibbles(b[:, 6:], 16), _fields(b[:, 2:6], 1, 1))
    return _groups(_signed(codes, 16), _half(b[:, :2]))


def _q5_1(b: Tensor) -> Groups:
    """32 values: float16 scale and minimum, 32 fifth bits, 16 bytes of nibbles."""
    codes = _with_fifth_bits(_nibbles(b[:, 8:], 16), _fields(b[:, 4:8], 1, 1))
    return _groups(codes, _half(b[:, :2]), _half(b[:, 2:4]))


def _q8_0(b: Tensor) -> Groups:
    """32 values: float16 scale, 32 int8."""
    return _groups(b[:, 2:].contiguous(), _half(b[:, :2]))


def _q2_k(b: Tensor) -> Groups:
    """256 values: 16 bytes of a scale and a minimum of 4 bits, 64 of bit pairs, float16 factors of both."""
    scales = _half(b[:, 80:82]) * (b[:, :16] & 15)
    minima = _half(b[:, 82:]) * (b[:, :16] >> 4)
    return _groups(_fields(b[:, 16:80], 2, 32), scales, minima.neg_())


def _q3_k(b: Tensor) -> Groups:
    """256 values: 32 bytes of high bits, 64 of low bit pairs, 16 scales of 6 bits, float16 factor of these.

    Together the bits mean -4 to 3, the scales' -32 to 31.
    """
    scales = _nibbles(b[:, 96:104], 8).bitwise_or_(_fields(b[:, 104:108], 2, 4) << 4)
    codes = _fields(b[:, 32:96], 2, 32).bitwise_or_(_fields(b[:, :32], 1, 32) << 2)
    return _groups(_signed(codes, 4), _half(b[:, 108:]) * _signed(scales, 32))


def _scales_and_minima(b: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight scales and negated minima, [blocks, 8] each, of a Q4_K or Q5_K block.

    It begins with float16 factors of both; 12 bytes of 6-bit integers follow.
    """
    d, m, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat((d & 63, (high & 15) | ((d >> 2) & 48)), dim=1)
    minima = torch.cat((m & 63, (high >> 4) | ((m >> 2) & 48)), dim=1)
    return _half(b[:, :2]) * scales, (_half(b[:, 2:4]) * minima).neg_()


def _q4_k(b: Tensor) -> Groups:
    """256 values: scales and minima, 128 bytes of nibbles."""
    return _groups(_nibbles(b[:, 16:], 32), *_scales_and_minima(b))


def _q5_k(b: Tensor) -> Groups:
    """256 values: scales and minima, 32 bytes of fifth bits, 128 of nibbles."""
    codes = _with_fifth_bits(_nibbles(b[:, 48:], 32), _fields(b[:, 16:48], 1, 32))
    return _groups(codes, *_scales_and_minima(b))


def _q6_k(b: Tensor) -> Groups:
    """256 values: 128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales, float16 factor of these."""
    codes = _nibbles(b[:, :128], 64).bitwise_or_(_fields(b[:, 128:192], 2, 32) << 4)
    return _groups(_signed(codes, 32), _half(b[:, 208:]) * b[:, 192:208].view(torch.int8))


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@cache
def _table(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int8, device=device)


def _looked_up(nibbles: Tensor, values: tuple[int, ...]) -> Tensor:
    """Return the values [blocks, values] at nibbles of the same shape."""
    return _table(values, nibbles.device).index_select(0, nibbles.view(-1).int()).view(nibbles.shape)


def _iq4_nl(b: Tensor) -> Groups:
    """32 values: float16 scale, 16 bytes of nibbles that number 16 unevenly spaced integers."""
    return _groups(_looked_up(_nibbles(b[:, 2:], 16), _IQ4), _half(b[:, :2]))


def _iq4_xs(b: Tensor) -> Groups:
    """256 values: float16 factor of the scales, their high bit pairs and low nibbles, 128 bytes as IQ4_NL."""
    scales = _nibbles(b[:, 4:8], 1).bitwise_or_(_fields(b[:, 2:4], 2, 1) << 4)
    return _groups(_looked_up(_nibbles(b[:, 8:], 16), _IQ4), _half(b[:, :2]) * _signed(scales, 32))


@cache
def _half_powers_of_two(device: torch.device) -> Tensor:
    """Return 2^(e - 128) of each exponent byte e, a shared scale for doubled values."""
    return torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 128).float().to(device)


def _mxfp4(b: Tensor) -> Groups:
    """32 values: an exponent, 16 bytes of nibbles, floats of 2 bits exponent and 1 bit mantissa."""
    scales = _half_powers_of_two(b.device).index_select(0, b[:, 0].int())
    return _groups(_looked_up(_nibbles(b[:, 1:], 16), _E2M1_DOUBLED), scales)


_UNPACK: dict[Type, Callable[[Tensor], Groups]] = {
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
    Type.Q5_0: _q5_0,
    Type.Q5_1: _q5_1,
    Type.Q8_0: _q8_0,
    Type.Q2_K: _q2_k,
    Type.Q3_K: _q3_k,
    Type.Q4_K: _q4_k,
    Type.Q5_K: _q5_k,
    Type.Q6_K: _q6_k,
    Type.IQ4_NL: _iq4_nl,
    Type.IQ4_XS: _iq4_xs,
    Type.MXFP4: _mxfp4,
}
BLOCK_TYPES = tuple(_UNPACK)
