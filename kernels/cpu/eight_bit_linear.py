"""Products with weights of int8 on a CPU; `kernels/eight_bit_linear.py` says what they compute.

Activations become integers of 14 bits with a scale for each token, so that sums are exact in int32: a token's
result depends neither on the tokens beside it nor on the order of sums, bit for bit.

Milliseconds of all products of a SmolLM2-135M step on two cores of an AMD EPYC (Zen 5):

    tokens                          1      4     16     64    256
    this                          4.1    5.7   13.7     39    138
    oneDNN, packed bfloat16       7.7    7.8   11.3     25     81
    oneDNN, packed float32       15.3   14.3   19.5     49    193
"""

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.compiler import compiled, floats, int8s, int16s, prange
from kernels.cpu.dot_products import dot_tile, num_lanes
from kernels.cpu.kv_heads import prefetch

_LIMIT = 8191  # with weights of 7 bits and a sign 2,048 products stay below 2**31
_CHUNK = 2048
_ROUNDER = np.float32(1.5 * 2**23)
_MANY_VALUES = 1 << 15  # which one thread quantizes in 15 µs; to share a loop out costs up to 10
_BLOCK = 32  # rows of the weight whose results are scaled while they are in the cache
_LANES = num_lanes()
# The tile fits into the registers of either instruction set. A single token is limited by memory, which is
# read fastest one row at a time.
_ROWS, _TOKENS = 4 if _LANES == 32 else 2, 4
_dot_tile = dot_tile(_ROWS, _TOKENS)
_dot_row = dot_tile(1, 1)


@compiled(exact=True)
def _quantize(x_ptr, x_stride, values_ptr, scales_ptr, size, token):
    """Write the integers and the scale of a token: NaN if a value is NaN or infinite."""
    x = floats(x_ptr + 4 * token * x_stride, 1, size)[0]
    values = int16s(values_ptr + 2 * token * size, 1, size)[0]
    # As integers, the bits of floats without their signs have the order of the floats; NaN comes last.
    bits, most = x.view(np.uint32), np.uint32(0)
    for i in range(size):
        magnitude = np.uint32(bits[i] & np.uint32(0x7FFFFFFF))
        most = magnitude if magnitude > most else most
    largest = np.uint32(most).view(np.float32)
    is_finite = most < np.uint32(0x7F800000)
    floats(scales_ptr, 1, token + 1)[0, token] = (
        largest / np.float32(_LIMIT) if is_finite else np.float32(np.nan)
    )
    factor = np.float32(_LIMIT) / largest if is_finite and largest > np.float32(1e-30) else np.float32(0.0)
    # A float of that size has no fraction: the sum is rounded, and its low bits are the integer.
    for i in range(size):
        values[i] = np.int16(np.float32(x[i] * factor + _ROUNDER).view(np.int32))


@compiled(exact=True)
def _multiply(
    values_ptr, scales_ptr, weight_ptr, weight_scale_ptr, bias_ptr, out_ptr,
    num_tokens, in_features, out_features, has_bias, first_row, end_row,
):  # fmt: skip
    """Compute the results of some rows of the weight."""
    values, weight = int16s(values_ptr, num_tokens, in_features), int8s(weight_ptr, out_features, in_features)
    scales, weight_scale = floats(scales_ptr, 1, num_tokens)[0], floats(weight_scale_ptr, 1, out_features)[0]
    bias, out = floats(bias_ptr, 1, out_features)[0], floats(out_ptr, num_tokens, out_features)
    even = in_features // _LANES * _LANES
    in_tiles = num_tokens // _TOKENS * _TOKENS
    row = first_row
    while row < end_row:
        is_tile = in_tiles > 0 and row + _ROWS <= end_row
        num_rows = _ROWS if is_tile else 1
        if is_tile:  # memory is idle while a tile is multiplied
            prefetch(weight_ptr + (row + _ROWS) * in_features, _ROWS * in_features)
        for start in range(0, even, _CHUNK):
            size = min(_CHUNK, even - start)
            x_ptr, row_ptr = values_ptr + 2 * start, weight_ptr + row * in_features + start
            if is_tile:
                for token in range(0, in_tiles, _TOKENS):
                    _dot_tile(
                        x_ptr + 2 * token * in_features, in_features, row_ptr, in_features, size,
                        out_ptr + 4 * (token * out_features + row), out_features, start > 0,
                    )  # fmt: skip
            for token in range(in_tiles if is_tile else 0, num_tokens):
                for i in range(num_rows):
                    _dot_row(
                        x_ptr + 2 * token * in_features, 0, row_ptr + i * in_features, 0, size,
                        out_ptr + 4 * (token * out_features + row + i), 0, start > 0,
                    )  # fmt: skip
        row += num_rows
    for token in range(num_tokens):
        if even < in_features:  # inputs that fill no vector
            for i in range(first_row, end_row):
                rest = np.int64(0)
                for k in range(even, in_features):
                    rest += np.int64(values[token, k]) * np.int64(weight[i, k])
                out[token, i] = np.float32(rest) + (out[token, i] if even else np.float32(0.0))
        for i in range(first_row, end_row):
            out[token, i] *= scales[token] * weight_scale[i]
        if has_bias:
            for i in range(first_row, end_row):
                out[token, i] += bias[i]


@compiled(parallel=True)
def _linear_kernel(
    x_ptr, x_stride, values_ptr, scales_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr,
    num_tokens, in_features, out_features, has_bias,
):  # fmt: skip
    """Quantize the tokens, and multiply."""
    if num_tokens * in_features < _MANY_VALUES:
        for token in range(num_tokens):
            _quantize(x_ptr, x_stride, values_ptr, scales_ptr, in_features, token)
    else:
        for token in prange(num_tokens):
            _quantize(x_ptr, x_stride, values_ptr, scales_ptr, in_features, token)
    for block in prange((out_features + _BLOCK - 1) // _BLOCK):
        _multiply(
            values_ptr, scales_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr,
            num_tokens, in_features, out_features, has_bias,
            block * _BLOCK, min(out_features, (block + 1) * _BLOCK),
        )  # fmt: skip


def eight_bit_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what the op does; weight int8."""
    num_tokens, in_features = x.shape
    values = torch.empty(num_tokens, in_features, dtype=torch.int16)
    scales, out = torch.empty(num_tokens), torch.empty(num_tokens, len(weight))
    _linear_kernel(
        x.data_ptr(),
        x.stride(0),
        values.data_ptr(),
        scales.data_ptr(),
        weight.data_ptr(),
        scale.data_ptr(),
        x.data_ptr() if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_tokens,
        in_features,
        len(weight),
        bias is not None,
    )
    return out
