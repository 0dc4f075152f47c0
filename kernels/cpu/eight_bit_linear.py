"""Products with weights of int8 on a CPU; `kernels/eight_bit_linear.py` says what they compute.

Activations become integers of 14 bits with a scale for each token, so that sums are exact in int32: a token's
result depends neither on the tokens beside it nor on the order of sums, bit for bit.

Milliseconds of all products of a SmolLM2-135M step on two cores of an AMD EPYC (Zen 5):

    tokens                          1      4     16     64    256
    this                          3.7    4.1    7.2     25    110
    oneDNN, packed bfloat16       7.7    7.8   11.3     25     81
    oneDNN, packed float32       15.3   14.3   19.5     49    193

Of 256 tokens the layers take 70 ms. The rest is the output head, whose 50 MB of results are new memory; of a
prompt it is computed for one token.
"""

import threading

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.cpu.compiler import compiled, floats, int16s, prange
from kernels.cpu.dot_products import dot_tile, num_lanes

_LIMIT = 8191
_ROUNDER = np.float32(1.5 * 2**23)
_MANY_VALUES = 1 << 15  # which one thread quantizes in 15 µs; to share a loop out costs up to 10
_KEPT_BYTES = 256 << 10
_BLOCK = 32  # rows of the weight that a thread takes at a time
_BYTES = 24 << 10  # of tokens that stay in the cache for all rows of a block
_LANES = num_lanes()
_ROWS, _TOKENS = 4, 6 if _LANES == 32 else 2  # sums for as many tokens fit into the registers
_dot_row = dot_tile(1, 1)
_dot_1, _dot_2, _dot_3, _dot_4, _dot_5, _dot_6 = (dot_tile(_ROWS, n) for n in range(1, 7))


@compiled(exact=True)
def _quantize(x_ptr, x_stride, values_ptr, scales_ptr, size, padded_size, token):
    """Write the integers and the scale of a token: NaN if a value is NaN or infinite."""
    x = floats(x_ptr + 4 * token * x_stride, 1, size)[0]
    values = int16s(values_ptr + 2 * token * padded_size, 1, padded_size)[0]
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
    for i in range(size, padded_size):
        values[i] = np.int16(0)


@compiled(exact=True)
def _multiply(
    values_ptr, scales_ptr, weight_ptr, weight_scale_ptr, bias_ptr, out_ptr,
    num_tokens, size, out_features, has_bias, first_row, end_row,
):  # fmt: skip
    """Compute the results of some rows of the weight."""
    num_tiles = (num_tokens + _TOKENS - 1) // _TOKENS
    tiles_at_once = max(1, _BYTES // (2 * _TOKENS * size))
    end_tiled = first_row + (end_row - first_row) // _ROWS * _ROWS
    for first_tile in range(0, num_tiles, tiles_at_once):
        end_tile = min(num_tiles, first_tile + tiles_at_once)
        for row in range(first_row, end_tiled, _ROWS):
            rows, scales, bias = weight_ptr + row * size, weight_scale_ptr + 4 * row, bias_ptr + 4 * row
            for tile in range(first_tile, end_tile):
                token = num_tokens * tile // num_tiles
                count = num_tokens * (tile + 1) // num_tiles - token
                x, x_scales = values_ptr + 2 * token * size, scales_ptr + 4 * token
                out = out_ptr + 4 * (token * out_features + row)
                if count == 6:
                    _dot_6(x, rows, size, size, out, out_features, x_scales, scales, has_bias, bias)
                elif count == 5:
                    _dot_5(x, rows, size, size, out, out_features, x_scales, scales, has_bias, bias)
                elif count == 4:
                    _dot_4(x, rows, size, size, out, out_features, x_scales, scales, has_bias, bias)
                elif count == 3:
                    _dot_3(x, rows, size, size, out, out_features, x_scales, scales, has_bias, bias)
                elif count == 2:
                    _dot_2(x, rows, size, size, out, out_features, x_scales, scales, has_bias, bias)
                else:
                    _dot_1(x, rows, size, size, out, out_features, x_scales, scales, has_bias, bias)
    for row in range(end_tiled, end_row):
        for token in range(num_tokens):
            _dot_row(
                values_ptr + 2 * token * size, weight_ptr + row * size, size, size,
                out_ptr + 4 * (token * out_features + row), out_features,
                scales_ptr + 4 * token, weight_scale_ptr + 4 * row, has_bias, bias_ptr + 4 * row,
            )  # fmt: skip


@compiled(parallel=True)
def _linear_kernel(
    x_ptr, x_stride, values_ptr, scales_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr,
    num_tokens, in_features, padded_size, out_features, has_bias,
):  # fmt: skip
    """Quantize the tokens, and multiply."""
    if num_tokens * in_features < _MANY_VALUES:
        for token in range(num_tokens):
            _quantize(x_ptr, x_stride, values_ptr, scales_ptr, in_features, padded_size, token)
    else:
        for token in prange(num_tokens):
            _quantize(x_ptr, x_stride, values_ptr, scales_ptr, in_features, padded_size, token)
    for block in prange((out_features + _BLOCK - 1) // _BLOCK):
        _multiply(
            values_ptr, scales_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr,
            num_tokens, padded_size, out_features, has_bias,
            block * _BLOCK, min(out_features, (block + 1) * _BLOCK),
        )  # fmt: skip


class _ThreadsOwn(threading.local):
    """The integers and scales of few tokens: to allocate them takes 1.5 µs, a third of what a call adds."""

    def __init__(self) -> None:
        self.memory = torch.empty(_KEPT_BYTES, dtype=torch.uint8)


_own = _ThreadsOwn()


def eight_bit_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what the op does; weight int8."""
    (num_tokens, in_features), out_features = x.shape, len(scale)
    rest = -in_features % _LANES
    if rest:  # rows that fill no vectors, which models do not have
        weight = pad(weight, (0, rest))
    num_bytes = num_tokens * (2 * (in_features + rest) + 4)
    quantized = _own.memory if num_bytes <= _KEPT_BYTES else torch.empty(num_bytes, dtype=torch.uint8)
    values_ptr, out = quantized.data_ptr(), torch.empty(num_tokens, out_features)
    _linear_kernel(
        x.data_ptr(),
        x.stride(0),
        values_ptr,
        values_ptr + 2 * num_tokens * (in_features + rest),
        weight.data_ptr(),
        scale.data_ptr(),
        x.data_ptr() if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_tokens,
        in_features,
        in_features + rest,
        out_features,
        bias is not None,
    )
    return out
