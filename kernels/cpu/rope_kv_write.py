"""Rotation of q and k and writing of k and v on a CPU; `kernels/rope_kv_write.py` says what is computed."""

import math
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from kernels.cpu.compiler import compiled, floats, int64s, prange
from kernels.cpu.kv_heads import KINDS, OTHER, write_head
from kernels.kv_layer import KVLayer
from kernels.kv_values import write_heads

if TYPE_CHECKING:
    from kernels.rope_kv_write import QKNorm

_NO_NORM, _RMS_NORM, _LAYER_NORM = range(3)
_SERIAL_TOKENS = 16
_BLOCK_TOKENS = 8


@compiled()
def _normalise(x_ptr, weight_ptr, head_dim, eps, norm):
    """Normalise a head in place."""
    x, weight = floats(x_ptr, 1, head_dim)[0], floats(weight_ptr, 1, head_dim)[0]
    if norm == _LAYER_NORM:
        total = np.float32(0.0)
        for i in range(head_dim):
            total += x[i]
        mean = np.float32(total / head_dim)
        for i in range(head_dim):
            x[i] -= mean
    squares = np.float32(0.0)
    for i in range(head_dim):
        squares += x[i] * x[i]
    inverse = np.float32(1.0 / math.sqrt(squares / head_dim + eps))
    for i in range(head_dim):
        x[i] = x[i] * inverse * weight[i]


@compiled()
def _rotate(x_ptr, angles_ptr, half, interleaved, scale):
    """Rotate the first 2 * half elements of a head in place and multiply them by `scale`."""
    x, angles = floats(x_ptr, 1, 2 * half)[0], floats(angles_ptr, 2, half)
    cos, sin = angles[0], angles[1]
    if interleaved:
        for i in range(half):
            first, second = x[2 * i] * scale, x[2 * i + 1] * scale
            x[2 * i] = first * cos[i] - second * sin[i]
            x[2 * i + 1] = second * cos[i] + first * sin[i]
    else:
        for i in range(half):
            first, second = x[i] * scale, x[half + i] * scale
            x[i] = first * cos[i] - second * sin[i]
            x[half + i] = second * cos[i] + first * sin[i]


@compiled()
def _compute_tokens(
    begin, end, q_ptr, q_stride, num_heads, k_ptr, k_stride, v_ptr, v_stride, num_kv_heads, head_dim,
    angles_ptr, half, interleaved, q_norm_ptr, k_norm_ptr, norm, eps, q_scale_ptr,
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, num_scales, kind, slots_ptr,
):  # fmt: skip
    """Compute tokens `begin` to `end`; the address of what is not given is 0."""
    slots = int64s(slots_ptr, 1, end)[0]
    one, weight_size = np.float32(1.0), head_dim if norm == _LAYER_NORM else 0
    for token in range(begin, end):
        angles = angles_ptr + 8 * token * half
        scale = floats(q_scale_ptr, 1, end)[0, token] if q_scale_ptr else one
        if half or norm:
            for i in range(num_heads):
                head = q_ptr + 4 * (token * q_stride + i * head_dim)
                if norm:
                    _normalise(head, q_norm_ptr + 4 * i * weight_size, head_dim, eps, norm)
                _rotate(head, angles, half, interleaved, scale)
        for i in range(num_kv_heads):
            head = k_ptr + 4 * (token * k_stride + i * head_dim)
            if norm:
                _normalise(head, k_norm_ptr + 4 * i * weight_size, head_dim, eps, norm)
            _rotate(head, angles, half, interleaved, one)
            place, value = slots[token] * num_kv_heads + i, v_ptr + 4 * (token * v_stride + i * head_dim)
            write_head(head, keys_ptr, key_scales_ptr, num_scales, kind, place, head_dim)
            write_head(value, values_ptr, value_scales_ptr, num_scales, kind, place, head_dim)


@compiled(parallel=True)
def _kernel(num_tokens, is_serial, *arguments):
    if is_serial:
        _compute_tokens(0, num_tokens, *arguments)
    else:
        for block in prange((num_tokens + _BLOCK_TOKENS - 1) // _BLOCK_TOKENS):
            first = np.int64(block) * _BLOCK_TOKENS
            _compute_tokens(first, min(first + _BLOCK_TOKENS, num_tokens), *arguments)


def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Tensor | None,
    kv: KVLayer,
    slot_mapping: Tensor,
    norm: "QKNorm | None" = None,
    interleaved: bool = False,
    q_scale: Tensor | None = None,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    keys, values, *scales = kv.tensors
    key_scales, value_scales = scales or (keys, values)
    norm_kind = _NO_NORM if norm is None else _LAYER_NORM if norm.is_layer_norm else _RMS_NORM
    kind = KINDS.get(keys.dtype, OTHER)
    _kernel(
        num_tokens,
        num_tokens <= _SERIAL_TOKENS,
        q.data_ptr(),
        q.stride(0),
        num_heads,
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        k.shape[1],
        head_dim,
        0 if angles is None else angles.data_ptr(),
        0 if angles is None else angles.shape[2],
        interleaved,
        0 if norm is None else norm.q_weight.data_ptr(),
        0 if norm is None else norm.k_weight.data_ptr(),
        norm_kind,
        0.0 if norm is None else norm.eps,
        0 if q_scale is None else q_scale.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        key_scales.data_ptr(),
        value_scales.data_ptr(),
        value_scales.shape[3],
        kind,
        slot_mapping.data_ptr(),
    )
    if kind == OTHER:
        write_heads(kv, slot_mapping, k, v)
