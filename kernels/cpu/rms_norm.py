"""RMSNorm on a CPU; `kernels/rms_norm.py` says what it computes."""

import math

import numpy as np
from torch import Tensor, empty_like

from kernels.cpu.compiler import compiled, floats


@compiled()
def _rms_norm_kernel(x_ptr, x_stride, weight_ptr, out_ptr, num_tokens, hidden, eps):
    x, out = floats(x_ptr, num_tokens, x_stride), floats(out_ptr, num_tokens, hidden)
    weight = floats(weight_ptr, 1, hidden)[0]
    for token in range(num_tokens):
        total = np.float32(0.0)
        for i in range(hidden):
            total += x[token, i] * x[token, i]
        inverse = np.float32(1.0 / math.sqrt(total / hidden + eps))
        for i in range(hidden):
            out[token, i] = x[token, i] * inverse * weight[i]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = empty_like(x)
    _rms_norm_kernel(
        x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], eps
    )
    return out
