"""RMSNorm and LayerNorm on a CPU; `kernels/rms_norm.py` and `kernels/layer_norm.py` say what they compute.

Microseconds on two AVX512 cores (AMD, Zen 5), 576 values a token:

    tokens             1     4    16    64   128   256
    add_rms_norm     1.9   2.1   2.7   5.2   7.2    13
      one thread     1.9   2.1   2.7   5.2   9.8    20
"""

import math

import numpy as np
from torch import Tensor, empty_like

from kernels.cpu.compiler import compiled, floats, prange

_SERIAL_VALUES = 65536  # which one thread normalises as fast as two share them out
_BLOCK_TOKENS = 8


@compiled()
def _mean(row):
    total = np.float32(0.0)
    for i in range(row.size):
        total += row[i]
    return np.float32(total / row.size)


@compiled()
def _inverse(row, mean, eps):
    total = np.float32(0.0)
    for i in range(row.size):
        total += (row[i] - mean) * (row[i] - mean)
    return np.float32(1.0 / math.sqrt(total / row.size + eps))


@compiled()
def _normalise_tokens(
    begin, end, x_ptr, x_stride, residual_ptr, residual_stride, weight_ptr, bias_ptr, x_weight_ptr, out_ptr,
    hidden, eps, multiplier, centres,
):  # fmt: skip
    """Addresses of what there is not are 0: a residual, a weight, its bias, a weight of x."""
    x, out = floats(x_ptr, end, x_stride), floats(out_ptr, end, hidden)
    residual = floats(residual_ptr, end, residual_stride)
    weight, x_weight = floats(weight_ptr, 1, hidden)[0], floats(x_weight_ptr, 1, hidden)[0]
    bias, multiplier, zero = floats(bias_ptr, 1, hidden)[0], np.float32(multiplier), np.float32(0.0)
    for token in range(begin, end):
        row = x[token, :hidden]
        if residual_ptr:
            total = residual[token, :hidden]
            if x_weight_ptr:
                inverse = _inverse(row, zero, eps) * multiplier
                for i in range(hidden):
                    total[i] += row[i] * inverse * x_weight[i]
            else:
                for i in range(hidden):
                    total[i] += row[i] * multiplier
            row = total
        if weight_ptr:
            mean = _mean(row) if centres else zero
            inverse = _inverse(row, mean, eps)
            for i in range(hidden):
                out[token, i] = (row[i] - mean) * inverse * weight[i]
        if bias_ptr:
            for i in range(hidden):
                out[token, i] += bias[i]


@compiled(parallel=True)
def _kernel(num_tokens, is_serial, *arguments):
    if is_serial:
        _normalise_tokens(0, num_tokens, *arguments)
    else:
        for block in prange((num_tokens + _BLOCK_TOKENS - 1) // _BLOCK_TOKENS):
            first = np.int64(block) * _BLOCK_TOKENS
            _normalise_tokens(first, min(first + _BLOCK_TOKENS, num_tokens), *arguments)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, None, weight, eps)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    multiplier: float = 1.0,
    x_weight: Tensor | None = None,
) -> Tensor:
    return _launch(x, residual, weight, eps, multiplier, x_weight)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return _launch(x, None, weight, eps, bias=bias, centres=True)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, multiplier: float = 1.0
) -> Tensor:
    return _launch(x, residual, weight, eps, multiplier, bias=bias, centres=True)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    multiplier: float = 1.0,
    x_weight: Tensor | None = None,
    bias: Tensor | None = None,
    centres: bool = False,
) -> Tensor:
    num_tokens, hidden = x.shape
    if weight is None:
        assert residual is not None
        out = residual
    else:
        out = empty_like(x)
    _kernel(
        num_tokens,
        num_tokens * hidden <= _SERIAL_VALUES,
        x.data_ptr(),
        x.stride(0),
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        0 if weight is None else weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if x_weight is None else x_weight.data_ptr(),
        out.data_ptr(),
        hidden,
        eps,
        multiplier,
        centres,
    )
    return out
