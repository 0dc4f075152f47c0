"""Gated activations on a CPU; `kernels/act_mul.py` says what they compute.

Microseconds on two AVX512 cores (AMD), threads that sleep when idle, 1536 values a token, beside the twins:

    tokens          1    16    64   256
    silu_mul      2.3   5.6    55    84
      twin        4.1    10   103   146
    gelu_tanh     2.3   6.4    51    86
      twin        5.5    62   149   332

The exact gelu is left to its twin: calls of erf take 4 ns a value.
"""

import math

import numpy as np
from torch import Tensor

from kernels.cpu.compiler import compiled, floats, prange
from kernels.cpu.exp import exp

_SILU, _GELU_TANH = range(2)
_ONE = np.float32(1.0)
_TANH_LINEAR, _TANH_CUBIC = np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715)

_SERIAL_VALUES = 32768  # 10 µs on one core; waking another takes up to 40
_BLOCK_TOKENS = 8


@compiled()
def _serial_kernel(gate_up_ptr, stride, out_ptr, num_tokens, intermediate, activation):
    gate_up = floats(gate_up_ptr, num_tokens, stride)
    out = floats(out_ptr, num_tokens, intermediate)
    for token in range(num_tokens):
        gate, up = gate_up[token, :intermediate], gate_up[token, intermediate:]
        if activation == _SILU:
            for i in range(intermediate):
                out[token, i] = gate[i] / (_ONE + exp(-gate[i])) * up[i]
        else:
            for i in range(intermediate):
                x = gate[i]
                # 0.5 * (1 + tanh(y)) is the sigmoid of 2 y.
                doubled = _TANH_LINEAR * (x + _TANH_CUBIC * x * x * x)
                out[token, i] = x / (_ONE + exp(-doubled)) * up[i]


@compiled(parallel=True)
def _parallel_kernel(gate_up_ptr, stride, out_ptr, num_tokens, intermediate, activation):
    for block in prange((num_tokens + _BLOCK_TOKENS - 1) // _BLOCK_TOKENS):
        first = block * _BLOCK_TOKENS
        _serial_kernel(
            gate_up_ptr + 4 * first * stride,
            stride,
            out_ptr + 4 * first * intermediate,
            min(_BLOCK_TOKENS, num_tokens - first),
            intermediate,
            activation,
        )


def silu_mul(gate_up: Tensor) -> Tensor:
    return _launch(gate_up, _SILU)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    return _launch(gate_up, _GELU_TANH)


def _launch(gate_up: Tensor, activation: int) -> Tensor:
    num_tokens, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, intermediate)
    kernel = _serial_kernel if num_tokens * intermediate <= _SERIAL_VALUES else _parallel_kernel
    kernel(gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), num_tokens, intermediate, activation)
    return out
