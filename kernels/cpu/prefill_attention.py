"""Attention of rows with several queries on a CPU; `kernels/prefill_attention.py` says what is computed.

A block of a row's queries goes through the splits of its keys in their order (Dao et al., 2022). What a query
gets depends neither on the other queries nor on the number of threads, bit for bit; alone it would get the
same from `kernels/cpu/decode_attention.py`.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.attention_batch import AttentionBatch, AttentionOptions
from kernels.cpu.attention_merge import begin, finish, include
from kernels.cpu.attention_splits import (
    SPARE_FLOATS,
    Scratch,
    Stored,
    list_slots,
    load_keys,
    load_values,
    matrix_floats,
    weigh,
)
from kernels.cpu.attention_tiles import LANES, SPLIT, multiply, padded
from kernels.cpu.compiler import c_function, call, compiled, floats, get_num_threads, int32s, prange
from kernels.cpu.kv_heads import KINDS
from kernels.kv_layer import KVLayer

_BLOCK = 64  # queries times heads of a group, about: keys and values are read once for them
_CHUNKS_PER_THREAD = 4
_FIELDS = 4  # of an item: row, first token of q, number of queries, position of the first
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@compiled(parallel=True)
def _prefill_kernel(
    address, q_ptr, q_stride, out_ptr, out_stride, group, head_dim,
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, num_scales, kind, page_size, num_kv_heads,
    pages_ptr, pages_stride, window, sinks_ptr,
    items_ptr, num_items, scratch_ptr, scratch_floats, max_queries, num_chunks, width, scale, softcap,
):  # fmt: skip
    arguments = (
        q_ptr, q_stride, out_ptr, out_stride, group, head_dim,
        keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, num_scales, kind, page_size, num_kv_heads,
        pages_ptr, pages_stride, window, sinks_ptr,
        items_ptr, num_items, scratch_ptr, scratch_floats, max_queries, num_chunks, width, scale, softcap,
    )  # fmt: skip
    for chunk in prange(num_chunks):
        call(address, (np.int64(chunk), *arguments))


def _prefill_part(
    chunk, q_ptr, q_stride, out_ptr, out_stride, group, head_dim,
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, num_scales, kind, page_size, num_kv_heads,
    pages_ptr, pages_stride, window, sinks_ptr,
    items_ptr, num_items, scratch_ptr, scratch_floats, max_queries, num_chunks, width, scale, softcap,
):  # fmt: skip
    for part in range(chunk, num_items * num_kv_heads, num_chunks):
        item, kv_head = int32s(items_ptr, num_items, _FIELDS)[part // num_kv_heads], part % num_kv_heads
        row, token, num_queries, position = (
            np.int64(item[0]), np.int64(item[1]), np.int64(item[2]), np.int64(item[3]),
        )  # fmt: skip
        offset = kv_head * group * head_dim
        _attend_block(
            q_ptr + 4 * (token * q_stride + offset), q_stride,
            out_ptr + 4 * (token * out_stride + offset), out_stride, group, kv_head,
            Stored(keys_ptr, key_scales_ptr, num_scales, kind, num_kv_heads, head_dim),
            Stored(values_ptr, value_scales_ptr, num_scales, kind, num_kv_heads, head_dim),
            page_size, pages_ptr + 4 * row * pages_stride,
            np.float32(scale), np.float32(softcap), window,
            sinks_ptr + 4 * kv_head * group if sinks_ptr else 0,
            num_queries, position, scratch_ptr + 4 * chunk * scratch_floats, max_queries * group, width,
        )  # fmt: skip


@compiled(inline=True)
def _attend_block(
    q_ptr, q_stride, out_ptr, out_stride, group, kv_head, keys, values, page_size, pages_ptr, scale, softcap,
    window, sinks_ptr, num_queries, position, scratch_ptr, max_rows, width,
):  # fmt: skip
    """Attend with the heads of a group and `num_queries` queries, the first at a position."""
    head_dim, rows = keys.head_dim, num_queries * group
    slots_ptr, spare_ptr = scratch_ptr, scratch_ptr + 8 * SPLIT
    statistics_ptr = spare_ptr + 4 * SPARE_FLOATS
    factors_ptr = statistics_ptr + 8 * max_rows
    queries_ptr = factors_ptr + 8 * max_rows
    scores_ptr = queries_ptr + 4 * max_rows * head_dim
    sums_ptr = scores_ptr + 4 * max_rows * SPLIT
    matrix_ptr = sums_ptr + 4 * max_rows * width
    factors = floats(factors_ptr, rows, 2)
    queries, statistics = floats(queries_ptr, rows, head_dim), floats(statistics_ptr, rows, 2)
    for row in range(rows):
        query, head = row // group, row % group
        source = floats(q_ptr + 4 * (query * q_stride + head * head_dim), 1, head_dim)[0]
        for i in range(head_dim):
            queries[row, i] = source[i]
        sink_ptr = sinks_ptr + 4 * head if sinks_ptr else 0
        peak, total = begin(sums_ptr + 4 * row * width, width, sink_ptr)
        statistics[row, 0], statistics[row, 1] = peak, total
    start, end = max(0, position + 1 - window) if window else 0, position + num_queries
    while start < end:
        count = min(start // SPLIT * SPLIT + SPLIT, end) - start
        list_slots(pages_ptr, page_size, start, start + count, slots_ptr)
        for first in range(0, count, LANES):
            load_keys(keys, kv_head, slots_ptr + 8 * first, matrix_ptr + 4 * first, spare_ptr)
        multiply(queries_ptr, head_dim, matrix_ptr, SPLIT, scores_ptr, SPLIT, rows, head_dim, count, 0)
        for row in range(rows):
            last = position + row // group
            first_visible = min(max(0, last + 1 - window - start), count) if window else 0
            end_visible = max(min(count, last + 1 - start), first_visible)
            before, added = _ONE, _ZERO
            if first_visible < end_visible:
                visible_ptr = scores_ptr + 4 * (row * SPLIT + first_visible)
                peak, total = weigh(visible_ptr, end_visible - first_visible, scale, softcap)
                peak, total, before, added = include(statistics[row, 0], statistics[row, 1], peak, total)
                statistics[row, 0], statistics[row, 1] = peak, total
            factors[row, 0], factors[row, 1] = before, added
            weights = floats(scores_ptr, rows, SPLIT)[row]
            for j in range(first_visible):
                weights[j] = _ZERO
            for j in range(end_visible, count):
                weights[j] = _ZERO
        load_values(values, kv_head, slots_ptr, count, matrix_ptr, width)
        multiply(scores_ptr, SPLIT, matrix_ptr, width, sums_ptr, width, rows, count, width, factors_ptr)
        start += count
    for row in range(rows):
        query, head = row // group, row % group
        target_ptr = out_ptr + 4 * (query * out_stride + head * head_dim)
        finish(statistics[row, 1], sums_ptr + 4 * row * width, head_dim, target_ptr)


class _Plan(NamedTuple):
    """What the layers of a step share: blocks of queries, and addresses."""

    items: Tensor  # int32 [num_items, _FIELDS]
    memory: Tensor
    scratch_floats: int
    max_queries: int
    num_chunks: int
    width: int


_scratch = Scratch()


def _plan(batch: AttentionBatch, num_heads: int, num_kv_heads: int, head_dim: int) -> _Plan:
    group = num_heads // num_kv_heads
    max_queries = max(1, _BLOCK // group)
    items, token = [], batch.num_decode_rows
    lens = zip(*batch.host_lens(), strict=True)
    for row, (num_queries, length) in enumerate(lens):
        if row < batch.num_decode_rows:
            continue
        for first in range(0, num_queries, max_queries):
            size = min(max_queries, num_queries - first)
            items.append((row, token + first, size, length - num_queries + first))
        token += num_queries
    items.sort(key=lambda item: -item[3])  # the longest first: it would delay the end of the others
    num_chunks = min(len(items) * num_kv_heads, _CHUNKS_PER_THREAD * get_num_threads())
    width = padded(head_dim)
    of_row = 4 + head_dim + SPLIT + width  # statistics, factors, a query, scores, sums
    scratch_floats = 2 * SPLIT + SPARE_FLOATS + max_queries * group * of_row + matrix_floats(head_dim)
    memory = _scratch.take(num_chunks * scratch_floats)
    table = torch.tensor(items, dtype=torch.int32)
    return _Plan(table, memory, scratch_floats, max_queries, num_chunks, width)


def prefill_attention(
    q: Tensor, kv: KVLayer, batch: AttentionBatch, out: Tensor, options: AttentionOptions
) -> None:
    scale, window, softcap, sinks = options
    _, num_heads, head_dim = q.shape
    keys, values, *scales = kv.tensors
    key_scales, value_scales = scales or (keys, values)
    _, page_size, num_kv_heads, _ = keys.shape
    items, memory, *sizes = batch.once(
        ("prefill", "cpu", num_heads, num_kv_heads, head_dim),
        lambda: _plan(batch, num_heads, num_kv_heads, head_dim),
    )
    _prefill_kernel(
        c_function(_prefill_part, 26, 2).address,
        q.data_ptr(),
        q.stride(0),
        out.data_ptr(),
        out.stride(0),
        num_heads // num_kv_heads,
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
        window,
        0 if sinks is None else sinks.data_ptr(),
        items.data_ptr(),
        len(items),
        memory.data_ptr(),
        *sizes,
        scale,
        softcap,
    )
