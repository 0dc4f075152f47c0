"""Attention of rows with one query each on a CPU; `kernels/decode_attention.py` says what is computed.

The keys of a row are divided into splits of a fixed size, whose results are then combined in their order: a
result depends neither on the other rows of the step nor on the number of threads.
"""

import threading
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.attention_batch import AttentionBatch, AttentionOptions
from kernels.cpu.compiler import compiled, floats, get_num_threads, int32s, int64s, prange
from kernels.cpu.exp import exp
from kernels.cpu.kv_heads import ITEM_BYTES, KINDS, prefetch, read_head
from kernels.kv_layer import KVLayer

_SPLIT = 64  # keys
_BLOCK = 16  # keys or values that are widened at a time; they stay in the first cache
_CHUNKS_PER_THREAD = 4  # parts of the work: a thread that starts late leaves some to others

_ZERO, _ONE, _TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)


@compiled()
def _ordered(bits):
    """Return an int32 ordered as the float32 with such bits; the inverse is the function itself."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@compiled()
def _list_slots(pages_ptr, page_size, begin, end, slots_ptr):
    """Write the slots of keys `begin` to `end` of a row to slots, int64."""
    page, offset = begin // page_size, begin % page_size
    pages, slots = int32s(pages_ptr, 1, page + end - begin)[0], int64s(slots_ptr, 1, end - begin)[0]
    for j in range(end - begin):
        slots[j] = np.int64(pages[page]) * page_size + offset
        offset += 1
        if offset == page_size:
            page, offset = page + 1, 0


@compiled()
def _prefetch_slots(stored_ptr, slot_bytes, slots_ptr, first, end):
    slots = int64s(slots_ptr, 1, end)[0]
    for j in range(first, end):
        prefetch(stored_ptr + slots[j] * slot_bytes, slot_bytes)


@compiled()
def _read_block(
    stored_ptr, scales_ptr, num_scales, kind, num_kv_heads, kv_head, head_dim, slots_ptr, count, block_ptr
):
    """Write keys or values in `count` slots to block, float32 [count, head_dim]."""
    slots = int64s(slots_ptr, 1, count)[0]
    for j in range(count):
        head, target = slots[j] * num_kv_heads + kv_head, block_ptr + 4 * j * head_dim
        read_head(stored_ptr, scales_ptr, num_scales, kind, head, head_dim, target)


@compiled()
def _score(q_ptr, block_ptr, scores_ptr, group, head_dim, count):
    """Write the products of q [group, head_dim] and `count` keys to scores, rows of _SPLIT."""
    q, keys = floats(q_ptr, group, head_dim), floats(block_ptr, count, head_dim)
    scores = floats(scores_ptr, group, _SPLIT)
    for j in range(count):
        for member in range(group):
            total = _ZERO
            for i in range(head_dim):
                total += q[member, i] * keys[j, i]
            scores[member, j] = total


@compiled()
def _add_values(weights_ptr, block_ptr, sums_ptr, group, head_dim, count):
    """Add `count` values with weights, rows of _SPLIT, to sums [group, head_dim]."""
    weights, values = floats(weights_ptr, group, _SPLIT), floats(block_ptr, count, head_dim)
    sums = floats(sums_ptr, group, head_dim)
    whole = count - count % 4
    for member in range(group):
        weight = weights[member]
        # Four values at a time: each sum is loaded and stored once for them.
        for j in range(0, whole, 4):
            for i in range(head_dim):
                first = weight[j] * values[j, i] + weight[j + 1] * values[j + 1, i]
                second = weight[j + 2] * values[j + 2, i] + weight[j + 3] * values[j + 3, i]
                sums[member, i] += first + second
        for j in range(whole, count):
            for i in range(head_dim):
                sums[member, i] += weight[j] * values[j, i]


@compiled()
def _weigh(scores_ptr, count, scale, softcap, statistics_ptr):
    """Turn `count` scores into weights e^(score - peak); write the peak and their sum to statistics."""
    scores, statistics = floats(scores_ptr, 1, count)[0], floats(statistics_ptr, 1, 2)[0]
    for j in range(count):
        scores[j] *= scale
    if softcap > 0:
        for j in range(count):
            scores[j] = softcap * (_ONE - _TWO / (_ONE + exp(scores[j] * (_TWO / softcap))))
    largest = np.int32(-(2**31))  # maxima of integers are vectorized, those of floats are not
    for j in range(count):
        largest = max(largest, _ordered(np.float32(scores[j]).view(np.int32)))
    peak, total = np.int32(_ordered(largest)).view(np.float32), _ZERO
    for j in range(count):
        scores[j] = exp(scores[j] - peak)
        total += scores[j]
    statistics[0], statistics[1] = peak, total


@compiled(parallel=True)
def _decode_kernel(
    q_ptr, q_stride, out_ptr, out_stride, num_rows, group, head_dim,
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, num_scales, kind, page_size, num_kv_heads,
    pages_ptr, pages_stride, lens_ptr, scale, softcap, window, sinks_ptr,
    partial_ptr, statistics_ptr, chunks_ptr, chunk_floats, num_items, num_chunks,
):  # fmt: skip
    for chunk in prange(num_chunks):
        _attend_chunk(
            q_ptr, q_stride, num_rows, group, head_dim,
            keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, num_scales, kind, page_size, num_kv_heads,
            pages_ptr, pages_stride, lens_ptr, np.float32(scale), np.float32(softcap), window,
            partial_ptr, statistics_ptr, chunks_ptr + 4 * chunk * chunk_floats,
            num_items * chunk // num_chunks, num_items * (chunk + 1) // num_chunks,
        )  # fmt: skip
    _combine(
        out_ptr, out_stride, num_rows, group, head_dim, num_kv_heads, lens_ptr, window, sinks_ptr,
        partial_ptr, statistics_ptr,
    )  # fmt: skip


@compiled()
def _splits(context_len, window):
    """Return the number of the first split of a row with visible keys, and of the one after the last."""
    begin = max(0, context_len - window) if window else 0
    return begin // _SPLIT, (context_len + _SPLIT - 1) // _SPLIT


@compiled()
def _attend_chunk(
    q_ptr, q_stride, num_rows, group, head_dim,
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, num_scales, kind, page_size, num_kv_heads,
    pages_ptr, pages_stride, lens_ptr, scale, softcap, window,
    partial_ptr, statistics_ptr, scratch_ptr, first_item, end_item,
):  # fmt: skip
    """Attend to items `first_item` to `end_item`: splits, numbered by row."""
    lens = int32s(lens_ptr, 1, num_rows)[0]
    num_heads = num_kv_heads * group
    slot_bytes = num_kv_heads * head_dim * ITEM_BYTES[kind]
    slots_ptr, scores_ptr = scratch_ptr, scratch_ptr + 16 * _SPLIT
    block_ptr = scores_ptr + 4 * num_heads * _SPLIT
    before = 0
    for row in range(num_rows):
        length, pages = lens[row], pages_ptr + 4 * row * pages_stride
        first_split, end_split = _splits(length, window)
        for item in range(max(first_item, before), min(end_item, before + end_split - first_split)):
            split = first_split + item - before
            begin = max(split * _SPLIT, length - window if window else 0)
            num_keys = min(split * _SPLIT + _SPLIT, length) - begin
            num_listed = min(length - begin, num_keys + _SPLIT)
            _list_slots(pages, page_size, begin, begin + num_listed, slots_ptr)
            for start in range(0, num_keys, _BLOCK):
                count = min(_BLOCK, num_keys - start)
                _prefetch_slots(values_ptr, slot_bytes, slots_ptr, start, start + count)
                for kv_head in range(num_kv_heads):
                    _read_block(
                        keys_ptr, key_scales_ptr, num_scales, kind, num_kv_heads, kv_head, head_dim,
                        slots_ptr + 8 * start, count, block_ptr,
                    )  # fmt: skip
                    head = kv_head * group
                    _score(
                        q_ptr + 4 * (row * q_stride + head * head_dim), block_ptr,
                        scores_ptr + 4 * (head * _SPLIT + start), group, head_dim, count,
                    )  # fmt: skip
            sums_ptr = partial_ptr + 4 * item * num_heads * head_dim
            sums = floats(sums_ptr, num_heads, head_dim)
            for head in range(num_heads):
                statistics = statistics_ptr + 8 * (item * num_heads + head)
                _weigh(scores_ptr + 4 * head * _SPLIT, num_keys, scale, softcap, statistics)
                for i in range(head_dim):
                    sums[head, i] = _ZERO
            for start in range(0, num_keys, _BLOCK):
                count = min(_BLOCK, num_keys - start)
                next_start = num_keys + start
                _prefetch_slots(
                    keys_ptr, slot_bytes, slots_ptr, next_start, min(next_start + _BLOCK, num_listed)
                )
                for kv_head in range(num_kv_heads):
                    _read_block(
                        values_ptr, value_scales_ptr, num_scales, kind, num_kv_heads, kv_head, head_dim,
                        slots_ptr + 8 * start, count, block_ptr,
                    )  # fmt: skip
                    head = kv_head * group
                    _add_values(
                        scores_ptr + 4 * (head * _SPLIT + start), block_ptr, sums_ptr + 4 * head * head_dim,
                        group, head_dim, count,
                    )  # fmt: skip
        before += end_split - first_split


@compiled()
def _combine(
    out_ptr, out_stride, num_rows, group, head_dim, num_kv_heads, lens_ptr, window, sinks_ptr,
    partial_ptr, statistics_ptr,
):  # fmt: skip
    """Write the weighted mean of the results of a row's splits, in their order."""
    num_heads, lens = num_kv_heads * group, int32s(lens_ptr, 1, num_rows)[0]
    for row in range(num_rows):
        first, end = _splits(lens[row], window)
        num_splits = end - first
        out = floats(out_ptr + 4 * row * out_stride, num_heads, head_dim)
        partial = floats(partial_ptr, num_splits * num_heads, head_dim)
        statistics = floats(statistics_ptr, num_splits * num_heads, 2)
        for head in range(num_heads):
            peak, total = np.float32(-np.inf), _ZERO
            if sinks_ptr:
                peak = floats(sinks_ptr, 1, num_heads)[0, head]
            for split in range(num_splits):
                peak = max(peak, statistics[split * num_heads + head, 0])
            if sinks_ptr:
                total = exp(floats(sinks_ptr, 1, num_heads)[0, head] - peak)
            for split in range(num_splits):
                place = split * num_heads + head
                statistics[place, 0] = exp(statistics[place, 0] - peak)
                total += statistics[place, 0] * statistics[place, 1]
            mean = out[head]
            for i in range(head_dim):
                mean[i] = _ZERO
            for split in range(num_splits):
                place = split * num_heads + head
                weight, values = statistics[place, 0] / total, partial[place]
                for i in range(head_dim):
                    mean[i] += weight * values[i]
        partial_ptr += 4 * num_splits * num_heads * head_dim
        statistics_ptr += 8 * num_splits * num_heads


class _Scratch(threading.local):
    """Memory of a thread that grows to the largest step: fresh memory of a step would cost page faults."""

    memory = torch.empty(0)

    def take(self, size: int) -> Tensor:
        if self.memory.numel() < size:
            self.memory = torch.empty(size)
        return self.memory


class _Plan(NamedTuple):
    """What the layers of a step share: addresses in `memory`, which a thread may replace by a larger one."""

    memory: Tensor
    partial: int
    statistics: int
    chunks: int
    chunk_floats: int
    num_items: int
    num_chunks: int


_scratch = _Scratch()


def _plan(batch: AttentionBatch, num_heads: int, head_dim: int, window: int) -> _Plan:
    num_items = sum(
        -(-length // _SPLIT) - (max(0, length - window) // _SPLIT if window else 0)
        for length in batch.host_lens()[1][: batch.num_decode_rows]
    )
    num_chunks = min(num_items, _CHUNKS_PER_THREAD * get_num_threads())
    chunk_floats = 4 * _SPLIT + num_heads * _SPLIT + _BLOCK * head_dim
    memory = _scratch.take(num_items * num_heads * (head_dim + 2) + num_chunks * chunk_floats)
    partial = memory.data_ptr()
    statistics = partial + 4 * num_items * num_heads * head_dim
    chunks = statistics + 8 * num_items * num_heads
    return _Plan(memory, partial, statistics, chunks, chunk_floats, num_items, num_chunks)


def decode_attention(
    q: Tensor, kv: KVLayer, batch: AttentionBatch, out: Tensor, options: AttentionOptions
) -> None:
    scale, window, softcap, sinks = options
    num_rows, num_heads, head_dim = q.shape
    keys, values, *scales = kv.tensors
    key_scales, value_scales = scales or (keys, values)
    _, page_size, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    plan = batch.once(
        ("decode", "cpu", num_heads, head_dim, window), lambda: _plan(batch, num_heads, head_dim, window)
    )
    _decode_kernel(
        q.data_ptr(),
        q.stride(0),
        out.data_ptr(),
        out.stride(0),
        num_rows,
        group,
        head_dim,
        keys.data_ptr(),
        values.data_ptr(),
        key_scales.data_ptr(),
        value_scales.data_ptr(),
        key_scales.shape[3],
        KINDS[keys.dtype],
        page_size,
        num_kv_heads,
        batch.page_table.data_ptr(),
        batch.page_table.stride(0),
        batch.context_lens.data_ptr(),
        scale,
        softcap,
        window,
        0 if sinks is None else sinks.data_ptr(),
        *plan[1:],
    )
