"""RMSNorm on a CPU; `kernels/rms_norm.py` says what it computes.

Microseconds on two AVX512 cores (AMD), threads that sleep when idle, 576 values a token, beside the twins:

    tokens            1    16    64   256
    rms_norm        2.0   2.6    47    52
      twin          8.0   9.4   173   187
    add_rms_norm    2.2   3.0    48    58
      twin          8.7    11   225   248
"""

import math

import numpy as np
from torch import Tensor, empty_like

from kernels.cpu.compiler import compiled, floats, prange

_SERIAL_VALUES = 65536  # 10 µs on one core; waking another takes up to 40
_BLOCK_TOKENS = 8


@compiled()
def _inverse(row, eps):
    total = np.float32(0.0)
    for i in range(row.size):
        total += row[i] * row[i]
    return np.float32(1.0 / math.sqrt(total / row.size + eps))


@compiled()
def _serial_kernel(
    x_ptr,
    x_stride,
    residual_ptr,
    residual_stride,
    weight_ptr,
    x_weight_ptr,
    out_ptr,
    num_tokens,
    hidden,
    eps,
    multiplier,
):
    """Addresses of what there is not are 0: a residual, a weight, a weight of x."""
    x, out = floats(x_ptr, num_tokens, x_stride), floats(out_ptr, num_tokens, hidden)
    residual = floats(residual_ptr, num_tokens, residual_stride)
    weight, x_weight = floats(weight_ptr, 1, hidden)[0], floats(x_weight_ptr, 1, hidden)[0]
    multiplier = np.float32(multiplier)
    for token in range(num_tokens):
        row = x[token, :hidden]
        if residual_ptr:
            total = residual[token, :hidden]
            if x_weight_ptr:
                inverse = _inverse(row, eps) * multiplier
                for i in range(hidden):
                    total[i] += row[i] * inverse * x_weight[i]
            else:
                for i in range(hidden):
                    total[i] += row[i] * multiplier
            row = total
        if weight_ptr:
            inverse = _inverse(row, eps)
            for i in range(hidden):
                out[token, i] = row[i] * inverse * weight[i]


@compiled(parallel=True)
def _parallel_kernel(
    x_ptr,
    x_stride,
    residual_ptr,
    residual_stride,
    weight_ptr,
    x_weight_ptr,
    out_ptr,
    num_tokens,
    hidden,
    eps,
    multiplier,
):
    for block in prange((num_tokens + _BLOCK_TOKENS - 1) // _BLOCK_TOKENS):
        first = block * _BLOCK_TOKENS
        _serial_kernel(
            x_ptr + 4 * first * x_stride,
            x_stride,
            residual_ptr + 4 * first * residual_stride,
            residual_stride,
            weight_ptr,
            x_weight_ptr,
            out_ptr + 4 * first * hidden,
            min(_BLOCK_TOKENS, num_tokens - first),
            hidden,
            eps,
            multiplier,
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, None, weight, eps, 1.0, None)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    multiplier: float = 1.0,
    x_weight: Tensor | None = None,
) -> Tensor:
    return _launch(x, residual, weight, eps, multiplier, x_weight)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    multiplier: float,
    x_weight: Tensor | None,
) -> Tensor:
    num_tokens, hidden = x.shape
    if weight is None:
        assert residual is not None
        out = residual
    else:
        out = empty_like(x)
    kernel = _serial_kernel if num_tokens * hidden <= _SERIAL_VALUES else _parallel_kernel
    kernel(
        x.data_ptr(),
        x.stride(0),
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),  # so that every row of no residual has address 0
        0 if weight is None else weight.data_ptr(),
        0 if x_weight is None else x_weight.data_ptr(),
        out.data_ptr(),
        num_tokens,
        hidden,
        eps,
        multiplier,
    )
    return out
