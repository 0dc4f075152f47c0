"""Keys and values of a row's splits on a CPU, as float32 matrices, and the weights of its keys.

A split is up to SPLIT keys; where one begins depends on nothing but the position of its keys in their row.
"""

import threading
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.attention_tiles import LANES, SPLIT, WORD_BYTES, padded, transpose_words, widen
from kernels.cpu.compiler import compiled, floats, int8s, int32s, int64s
from kernels.cpu.exp import exp
from kernels.cpu.kv_heads import INT8, ITEM_BYTES, prefetch, read_element, read_scale

_TANH, _NEAR = (np.float32(-17 / 315), np.float32(2 / 15), np.float32(-1 / 3)), np.float32(0.2**2)
_ZERO, _ONE, _TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)


class Scratch(threading.local):
    """Memory of a thread that grows to the largest step: fresh memory of a step would cost page faults."""

    memory = torch.empty(0)

    def take(self, size: int) -> Tensor:
        """Return at least `size` floats; they are in use until the next call."""
        if self.memory.numel() < size:
            self.memory = torch.empty(size)
        return self.memory


class Stored(NamedTuple):
    """Keys or values of a layer in its pages; all are numbers. Of the kinds but int8 no scale is read."""

    elements: int  # address
    scales: int  # address
    num_scales: int
    kind: int
    num_kv_heads: int
    head_dim: int


def matrix_floats(head_dim: int) -> int:
    """Return the size of a matrix that `load_keys` and `load_values` fill."""
    return SPLIT * max(padded(head_dim), -(-head_dim // WORD_BYTES) * WORD_BYTES)


SPARE_FLOATS = 4 * LANES + LANES * LANES
"""Size of the spare memory of `load_keys`."""


@compiled()
def list_slots(pages_ptr, page_size, begin, end, slots_ptr):
    """Write the slots of keys `begin` to `end` of a row, int64; up to SPLIT the last one is repeated."""
    page, offset = begin // page_size, begin % page_size
    pages, slots = int32s(pages_ptr, 1, page + end - begin)[0], int64s(slots_ptr, 1, SPLIT)[0]
    for j in range(end - begin):
        slots[j] = np.int64(pages[page]) * page_size + offset
        offset += 1
        if offset == page_size:
            page, offset = page + 1, 0
    for j in range(end - begin, SPLIT):
        slots[j] = slots[end - begin - 1]


@compiled()
def prefetch_slots(stored, slots_ptr, first, end):
    """Begin to load what is in slots number `first` to `end` of a list."""
    slots = int64s(slots_ptr, 1, SPLIT)[0]
    num_bytes = stored.num_kv_heads * stored.head_dim * ITEM_BYTES[stored.kind]
    scale_bytes = 2 * stored.num_kv_heads * stored.num_scales if stored.kind == INT8 else 0
    for j in range(first, end):
        prefetch(stored.elements + slots[j] * num_bytes, num_bytes)
        prefetch(stored.scales + slots[j] * scale_bytes, scale_bytes)


@compiled()
def load_keys(stored, kv_head, slots_ptr, keys_ptr, spare_ptr):
    """Write the keys of a KV head in LANES slots to keys, float32 [head_dim, LANES] in rows of SPLIT."""
    num_kv_heads, kind = stored.num_kv_heads, stored.kind
    head_bytes = stored.head_dim * ITEM_BYTES[kind]
    whole = head_bytes // WORD_BYTES * WORD_BYTES
    elements, slot_bytes = stored.elements + kv_head * head_bytes, num_kv_heads * head_bytes
    scales_ptr, rows_ptr, rest_ptr = spare_ptr, spare_ptr + 4 * LANES, spare_ptr + 12 * LANES
    slots = int64s(slots_ptr, 1, LANES)[0]
    if kind == INT8:
        scales = floats(scales_ptr, 1, LANES)[0]
        for j in range(LANES):
            scales[j] = read_scale(stored.scales, stored.num_scales, slots[j] * num_kv_heads + kv_head)
    for first in range(0, whole, WORD_BYTES):
        target = keys_ptr + 4 * SPLIT * (first // ITEM_BYTES[kind])
        transpose_words(elements + first, slot_bytes, slots_ptr, scales_ptr, target, kind)
    if whole < head_bytes:  # the rest of the heads is copied, as other memory may follow it
        rows, rest = int64s(rows_ptr, 1, LANES)[0], int8s(rest_ptr, LANES, WORD_BYTES)
        for j in range(LANES):
            rows[j] = j
            source = int8s(elements + slots[j] * slot_bytes, 1, head_bytes)[0]
            for i in range(head_bytes - whole):
                rest[j, i] = source[whole + i]
        target = keys_ptr + 4 * SPLIT * (whole // ITEM_BYTES[kind])
        transpose_words(rest_ptr, WORD_BYTES, rows_ptr, scales_ptr, target, kind)


@compiled()
def load_values(stored, kv_head, slots_ptr, count, values_ptr, stride):
    """Write the values of a KV head in `count` slots to values, float32 [count, head_dim]."""
    slots = int64s(slots_ptr, 1, count)[0]
    head_dim, kind = stored.head_dim, stored.kind
    whole, scale = head_dim // LANES * LANES, _ONE
    for j in range(count):
        head, target = slots[j] * stored.num_kv_heads + kv_head, values_ptr + 4 * j * stride
        if kind == INT8:
            scale = read_scale(stored.scales, stored.num_scales, head)
        source = stored.elements + head * head_dim * ITEM_BYTES[kind]
        for i in range(0, whole, LANES):
            widen(source + i * ITEM_BYTES[kind], scale, target + 4 * i, kind)
        for i in range(whole, head_dim):
            floats(target, 1, head_dim)[0, i] = read_element(source, scale, i, kind)


@compiled()
def _ordered(bits):
    """Return an int32 ordered as the float32 with such bits; the inverse is the function itself."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@compiled()
def _tanh(x):
    """Return tanh(x) of a float32; near 0, where the other formula cancels, by its Taylor series."""
    square = x * x
    c7, c5, c3 = _TANH
    near = x * (_ONE + square * (c3 + square * (c5 + square * c7)))
    return near if square < _NEAR else _ONE - _TWO / (_ONE + exp(_TWO * x))


@compiled()
def weigh(scores_ptr, count, scale, softcap):
    """Turn `count` scores into weights e^(score - peak); returns the peak, and the sum of the weights."""
    scores = floats(scores_ptr, 1, count)[0]
    for j in range(count):
        scores[j] *= scale
    if softcap > 0:
        for j in range(count):
            scores[j] = softcap * _tanh(scores[j] / softcap)
    largest = np.int32(-(2**31))  # maxima of integers are vectorized, those of floats are not
    for j in range(count):
        largest = max(largest, _ordered(np.float32(scores[j]).view(np.int32)))
    peak, total = np.int32(_ordered(largest)).view(np.float32), _ZERO
    for j in range(count):
        scores[j] = exp(scores[j] - peak)
        total += scores[j]
    return peak, total
