"""Weights of four bits with one scale per group of inputs: their layout, and how a tile of them is unpacked.

A code is an integer from which the group's zero point (8 if there is none) is subtracted, or an FP4 number
(E2M1; OCP Microscaling Formats, v1.0). The codes of 32 rows and 128 inputs are 2,048 consecutive bytes, so
that a program reads whole lines of memory whatever the shape: on an H200 one row of activations times
4096 -> 28672 takes 24.3 µs with it and 34.6 µs with rows of K / 2 bytes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import dispatch, tl, triton

TILE_ROWS = 32
TILE_INPUTS = 128
GROUP_SIZES = (32, 64, 128)
_HALF = TILE_INPUTS // 2  # bytes of a row in a tile: input i and input i + 64 share byte i
_SYMMETRIC_ZERO = 8
_FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_VALUES = (*_FP4_MAGNITUDES, *(-value for value in _FP4_MAGNITUDES))


class FourBitWeight(NamedTuple):
    """A weight [out_features, in_features] in tiles; experts have a leading dimension in all three tensors.

    values: uint8 [tiles of rows, tiles of inputs, 32, 64], the low four bits of a byte first. scales: of 16
    or 32 bits, [groups, 32 * tiles of rows], value = (code - zero) * scale. zeros: uint8 of the shape of
    scales; None for 8, and with FP4. A group has 32, 64 or a multiple of 128 inputs. Rows and inputs past the
    end are arbitrary codes with scales of 0.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    in_features: int
    out_features: int
    is_float: bool = False

    def expert(self, index: int) -> "FourBitWeight":
        """Return the weight of one expert."""
        zeros = None if self.zeros is None else self.zeros[index]
        return self._replace(values=self.values[index], scales=self.scales[index], zeros=zeros)

    def row_tiles(self, first: int, end: int) -> "FourBitWeight":
        """Return the rows of tiles `first` to `end`; the tensors share their storage."""
        columns = slice(first * TILE_ROWS, end * TILE_ROWS)
        return self._replace(
            values=self.values[first:end],
            scales=self.scales[:, columns],
            zeros=None if self.zeros is None else self.zeros[:, columns],
            out_features=min(self.out_features, end * TILE_ROWS) - first * TILE_ROWS,
        )


def num_tiles(out_features: int, in_features: int) -> tuple[int, int]:
    """Return the tiles of rows and of inputs that a weight takes."""
    return -(-out_features // TILE_ROWS), -(-in_features // TILE_INPUTS)


def pack_rows(codes: Tensor) -> Tensor:
    """Return rows of codes uint8 [n, in_features] as bytes of tiles, [n, tiles of inputs, 64]."""
    padding = -codes.shape[1] % TILE_INPUTS
    halves = torch.nn.functional.pad(codes, (0, padding)).unflatten(1, (-1, 2, _HALF))
    return halves[:, :, 0] | halves[:, :, 1] << 4


# PTX of four bytes to two times four numbers of 16 bits, the low nibbles first. Inline assembly has to be
# elementwise (byte i of a result from byte i of the argument): the compiler moves it across layouts.
_WIDEN = "{{ .reg .b32 a, b, c, d; prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342; {} }}"


def _integers(exponent: str) -> str:
    """Return PTX that makes codes the last bits of a power of two, whose bits are `exponent`."""
    masked = "lop3.b32 ${}, {}, 0x000F000F, " + exponent + ", 0xEA; "
    high = "shr.u32 c, a, 4; shr.u32 d, b, 4; "
    pairs = "".join(masked.format(*pair) for pair in enumerate("abcd"))
    return _WIDEN.format(high + pairs)


def _fp4(mask: str, low_shift: int, high_shift: int) -> str:
    """Return PTX that moves signs to bit 15, and exponents and mantissas to the bits of `mask`."""

    def placed(result: int, source: str, sign_shift: int, shift: int) -> str:
        return (
            f"shl.b32 c, {source}, {sign_shift}; and.b32 c, c, 0x80008000; "
            f"shl.b32 d, {source}, {shift}; lop3.b32 ${result}, d, {mask}, c, 0xEA; "
        )

    low = placed(0, "a", 12, low_shift) + placed(1, "b", 12, low_shift)
    return _WIDEN.format(low + placed(2, "a", 8, high_shift) + placed(3, "b", 8, high_shift))


_BF16_INTEGERS = tl.constexpr(_integers("0x43004300"))  # 128 + code
_FP16_INTEGERS = tl.constexpr(_integers("0x64006400"))  # 1024 + code
_BF16_FP4 = tl.constexpr(_fp4("0x01C001C0", 6, 2))  # value * 2 ** -126
_FP16_FP4 = tl.constexpr(_fp4("0x0E000E00", 9, 5))  # value * 2 ** -14


@triton.jit
def _fp4_value(code):
    """Return twice the FP4 number of a code, an integer."""
    power = (code >> 1) & 3
    mantissa = code & 1
    magnitude = tl.where(power == 0, mantissa, (mantissa + 2) << tl.maximum(power - 1, 0))
    return tl.where(code >= 8, -magnitude, magnitude)


@triton.jit
def unpack(codes, dtype: tl.constexpr, IS_FLOAT: tl.constexpr, USE_PTX: tl.constexpr):
    """Return the numbers of the low and of the high nibbles of bytes, in a dtype.

    Integers are those plus a power of two, which `_zero_points` also adds.

    USE_PTX, for 16 bits on NVIDIA GPUs, takes 2 instructions a pair of numbers in place of 6.
    """
    if USE_PTX:
        BF16: tl.constexpr = _BF16_FP4 if IS_FLOAT else _BF16_INTEGERS
        FP16: tl.constexpr = _FP16_FP4 if IS_FLOAT else _FP16_INTEGERS
        FACTOR: tl.constexpr = 2.0**126 if dtype == tl.bfloat16 else 2.0**14
        if dtype == tl.bfloat16:
            low, high = tl.inline_asm_elementwise(
                BF16, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            low, high = tl.inline_asm_elementwise(
                FP16, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
            )
        if IS_FLOAT:
            low = low * FACTOR
            high = high * FACTOR
    else:
        wide = codes.to(tl.int32)
        if IS_FLOAT:
            low = _fp4_value(wide & 15).to(dtype) * 0.5
            high = _fp4_value(wide >> 4).to(dtype) * 0.5
        else:
            low = (wide & 15).to(dtype)
            high = (wide >> 4).to(dtype)
    return low, high


@triton.jit
def _zero_points(zero_ptr, dtype: tl.constexpr, HAS_ZEROS: tl.constexpr, USE_PTX: tl.constexpr):
    """Return the zero points of a group plus what `unpack` adds to codes, [rows, 1] or [1, 1]."""
    BASE: tl.constexpr = (128 if dtype == tl.bfloat16 else 1024) if USE_PTX else 0
    if HAS_ZEROS:
        zero = (tl.load(zero_ptr).to(tl.int32) + BASE).to(dtype)[:, None]
    else:
        zero = tl.full([1, 1], 8 + BASE, dtype)
    return zero


@triton.jit
def tile_sums(
    acc,
    x_row,
    is_row,
    values_ptr,
    scales_ptr,
    zeros_ptr,
    row,
    first,
    end,
    in_features,
    num_rows,
    GROUP_SIZE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    WEIGHT_LEFT: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
    EVEN_K: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """Return acc plus the products of rows of x with rows of the weight, over tiles of inputs first to end.

    x_row: pointers [BLOCK_M] to the first inputs of rows; is_row [BLOCK_M]; row [BLOCK_N] of the weight,
    whose scales have num_rows columns. With WEIGHT_LEFT acc is [BLOCK_N, BLOCK_M] and the weight stays in
    registers, else acc is [BLOCK_M, BLOCK_N]. With SCALE_SUMS, for WEIGHT_LEFT, the sum of a group is scaled,
    else the weight.
    The numbers here are those of the layout: tiles of 32 rows and 128 inputs, 64 bytes a row, 2048 in all.
    """
    dtype: tl.constexpr = x_row.dtype.element_ty
    SPAN: tl.constexpr = 32 if GROUP_SIZE == 32 else 64
    lane = tl.arange(0, SPAN)
    tiles = tl.cdiv(in_features, 128)
    weight = values_ptr + (row // 32).to(tl.int64) * tiles * 2048 + row % 32 * 64
    for tile in range(first, end):
        for piece in tl.static_range(64 // SPAN):
            codes = tl.load(weight[:, None] + tile * 2048 + (piece * SPAN + lane)[None, :])
            low, high = unpack(codes, dtype, IS_FLOAT, USE_PTX)
            k = tile * 128 + piece * SPAN
            group = k // GROUP_SIZE
            scale = tl.load(scales_ptr + group * num_rows + row).to(tl.float32)
            high_scale = scale
            if not IS_FLOAT:
                zero = _zero_points(zeros_ptr + group * num_rows + row, dtype, HAS_ZEROS, USE_PTX)
                high_zero = zero
            if GROUP_SIZE < 128:
                group = (k + 64) // GROUP_SIZE
                high_scale = tl.load(scales_ptr + group * num_rows + row).to(tl.float32)
                if not IS_FLOAT:
                    high_zero = _zero_points(zeros_ptr + group * num_rows + row, dtype, HAS_ZEROS, USE_PTX)
            if not IS_FLOAT:
                low -= zero
                high -= high_zero
            x_low = x_row[:, None] + k + lane[None, :]
            x_high = x_low + 64
            if EVEN_K:
                x_low = tl.load(x_low, mask=is_row[:, None], other=0.0)
                x_high = tl.load(x_high, mask=is_row[:, None], other=0.0)
            else:
                left = in_features - k - lane[None, :]
                x_low = tl.load(x_low, mask=is_row[:, None] & (left > 0), other=0.0)
                x_high = tl.load(x_high, mask=is_row[:, None] & (left > 64), other=0.0)
            if not SCALE_SUMS:
                low *= scale.to(dtype)[:, None]
                high *= high_scale.to(dtype)[:, None]
            if WEIGHT_LEFT and SCALE_SUMS:
                part = tl.dot(low, tl.trans(x_low), input_precision="ieee")
                if GROUP_SIZE < 128:
                    acc += part * scale[:, None]
                    acc += tl.dot(high, tl.trans(x_high), input_precision="ieee") * high_scale[:, None]
                else:
                    acc += tl.dot(high, tl.trans(x_high), part, input_precision="ieee") * scale[:, None]
            elif WEIGHT_LEFT:
                acc = tl.dot(low, tl.trans(x_low), acc, input_precision="ieee")
                acc = tl.dot(high, tl.trans(x_high), acc, input_precision="ieee")
                if USE_PTX:
                    # Each tile reads the sums, which waits for the products: else Triton 3.6 overwrites the
                    # weight's registers with the next tile while products still read them.
                    acc = tl.inline_asm_elementwise(
                        "mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=True, pack=1
                    )
            else:
                acc = tl.dot(x_low, tl.trans(low), acc, input_precision="ieee")
                acc = tl.dot(x_high, tl.trans(high), acc, input_precision="ieee")
    return acc


@triton.jit
def _dequantize_kernel(
    values_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    out_features,
    in_features,
    num_rows,
    GROUP_SIZE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    USE_PTX: tl.constexpr,
):
    """One program per tile of the weight."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    SPAN: tl.constexpr = 32 if GROUP_SIZE == 32 else 64
    lane = tl.arange(0, SPAN)
    row_in_tile = tl.arange(0, 32)
    row = tl.program_id(1) * 32 + row_in_tile
    place = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    for piece in tl.static_range(64 // SPAN):
        inputs = piece * SPAN + lane
        codes = tl.load(values_ptr + place * 2048 + row_in_tile[:, None] * 64 + inputs[None, :])
        both = unpack(codes, dtype, IS_FLOAT, USE_PTX)
        for half in tl.static_range(2):
            k = tl.program_id(0) * 128 + piece * SPAN + half * 64
            at = k // GROUP_SIZE * num_rows + row
            values = both[half]
            if not IS_FLOAT:
                values -= _zero_points(zeros_ptr + at, dtype, HAS_ZEROS, USE_PTX)
            values = values.to(tl.float32) * tl.load(scales_ptr + at).to(tl.float32)[:, None]
            inside = (row < out_features)[:, None] & (k + lane < in_features)[None, :]
            target = out_ptr + row.to(tl.int64)[:, None] * in_features + k + lane[None, :]
            tl.store(target, values.to(dtype), mask=inside)


def dequantize_triton(values: Tensor, weight: FourBitWeight, dtype: torch.dtype) -> Tensor:
    out = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=values.device)
    tiles_n, tiles_k = values.shape[:2]
    _dequantize_kernel[(tiles_k, tiles_n)](
        values,
        weight.scales,
        weight.zeros if weight.zeros is not None else weight.scales,
        out,
        weight.out_features,
        weight.in_features,
        weight.scales.stride(0),
        **constants(weight, out),
        num_warps=4,
    )
    return out


def dequantize_torch(values: Tensor, weight: FourBitWeight, dtype: torch.dtype) -> Tensor:
    """Return a weight [out_features, in_features] in a dtype; `values` are its own."""
    codes = torch.cat((values & 15, values >> 4), -1).transpose(1, 2).flatten(2).flatten(0, 1)
    table = torch.tensor(_FP4_VALUES, device=codes.device)
    wide = table[codes.int()] if weight.is_float else codes.float()
    groups = wide.unflatten(1, (-1, min(weight.group_size, wide.shape[1])))
    if not weight.is_float:
        groups -= _SYMMETRIC_ZERO if weight.zeros is None else weight.zeros.t()[..., None]
    groups *= weight.scales.t()[..., None]
    return groups.flatten(1)[: weight.out_features, : weight.in_features].to(dtype)


_dequantize = dispatch(dequantize_triton, dequantize_torch)


def dequantize(weight: FourBitWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight [out_features, in_features] in a dtype."""
    return _dequantize(weight.values, weight, dtype)


def constants(weight: FourBitWeight, x: Tensor) -> dict[str, int | bool]:
    """Return the constants of `tile_sums` that follow from a weight and the activations' dtype and device."""
    return {
        "GROUP_SIZE": weight.group_size,
        "HAS_ZEROS": weight.zeros is not None,
        "IS_FLOAT": weight.is_float,
        "USE_PTX": x.is_cuda and torch.version.hip is None and x.element_size() == 2,
    }
