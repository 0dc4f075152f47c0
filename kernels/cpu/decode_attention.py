"""Attention of rows with one query each on a CPU; `kernels/decode_attention.py` says what is computed.

The keys of a row are divided into splits of a fixed size, whose results are then merged in their order: a
result depends neither on the other rows of the step nor on the number of threads, bit for bit.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.attention_batch import AttentionBatch, AttentionOptions
from kernels.cpu.attention_merge import begin, finish, merge
from kernels.cpu.attention_splits import (
    SPARE_FLOATS,
    Scratch,
    Stored,
    list_slots,
    load_keys,
    load_values,
    matrix_floats,
    prefetch_slots,
    weigh,
)
from kernels.cpu.attention_tiles import LANES, SPLIT, multiply, padded
from kernels.cpu.compiler import c_function, call, compiled, floats, get_num_threads, int32s, prange
from kernels.cpu.kv_heads import KINDS
from kernels.kv_layer import KVLayer

_CHUNKS_PER_THREAD = 4  # parts of the work: a thread that starts late leaves some to others


@compiled()
def _list_items(lens_ptr, num_rows, window, items_ptr, starts_ptr):
    """List the splits of all rows: row, first visible key and last one + 1; and each row's first item."""
    lens, starts = int32s(lens_ptr, 1, num_rows)[0], int32s(starts_ptr, 1, num_rows + 1)[0]
    item = 0
    for row in range(num_rows):
        starts[row] = item
        begin = max(0, lens[row] - window) if window else 0
        while begin < lens[row]:
            end = min(begin // SPLIT * SPLIT + SPLIT, lens[row])
            fields = int32s(items_ptr, item + 1, 3)[item]
            fields[0], fields[1], fields[2] = row, begin, end
            begin, item = end, item + 1
    starts[num_rows] = item


@compiled(parallel=True)
def _decode_kernel(
    address, q_ptr, q_stride, out_ptr, out_stride, num_rows, group, head_dim,
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, num_scales, kind, page_size, num_kv_heads,
    pages_ptr, pages_stride, sinks_ptr,
    items_ptr, starts_ptr, partial_ptr, statistics_ptr, chunks_ptr, chunk_floats, num_items, num_chunks,
    width, scale, softcap,
):  # fmt: skip
    arguments = (
        q_ptr, q_stride, out_ptr, out_stride, num_rows, group, head_dim,
        keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, num_scales, kind, page_size, num_kv_heads,
        pages_ptr, pages_stride, sinks_ptr,
        items_ptr, starts_ptr, partial_ptr, statistics_ptr, chunks_ptr, chunk_floats, num_items, num_chunks,
        width,
    )  # fmt: skip
    for chunk in prange(num_chunks):
        call(address, (np.int64(chunk), *arguments, scale, softcap))
    call(address, (num_chunks, *arguments, scale, softcap))


def _decode_part(
    chunk, q_ptr, q_stride, out_ptr, out_stride, num_rows, group, head_dim,
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, num_scales, kind, page_size, num_kv_heads,
    pages_ptr, pages_stride, sinks_ptr,
    items_ptr, starts_ptr, partial_ptr, statistics_ptr, chunks_ptr, chunk_floats, num_items, num_chunks,
    width, scale, softcap,
):  # fmt: skip
    """Compute a chunk, or after the last one combine the splits of the rows that are in several chunks."""
    if chunk < num_chunks:
        _attend_chunk(
            q_ptr, q_stride, out_ptr, out_stride, num_rows, group,
            Stored(keys_ptr, key_scales_ptr, num_scales, kind, num_kv_heads, head_dim),
            Stored(values_ptr, value_scales_ptr, num_scales, kind, num_kv_heads, head_dim),
            page_size, pages_ptr, pages_stride, np.float32(scale), np.float32(softcap), sinks_ptr,
            items_ptr, starts_ptr, partial_ptr, statistics_ptr, chunks_ptr + 4 * chunk * chunk_floats,
            num_items * chunk // num_chunks, num_items * (chunk + 1) // num_chunks, width,
        )  # fmt: skip
        return
    items, starts = int32s(items_ptr, num_items, 3), int32s(starts_ptr, 1, num_rows + 1)[0]
    last = -1
    for chunk in range(1, num_chunks):
        border = num_items * chunk // num_chunks
        row = items[border, 0]
        if row > last and starts[row] < border:
            last = row
            _combine(
                row, out_ptr + 4 * row * out_stride, num_kv_heads * group, head_dim, sinks_ptr, starts_ptr,
                partial_ptr, statistics_ptr, width,
            )  # fmt: skip


@compiled(inline=True)
def _attend_chunk(
    q_ptr, q_stride, out_ptr, out_stride, num_rows, group, keys, values, page_size, pages_ptr, pages_stride,
    scale, softcap, sinks_ptr, items_ptr, starts_ptr, partial_ptr, statistics_ptr, scratch_ptr, first_item,
    end_item, width,
):  # fmt: skip
    """Attend to items `first_item` to `end_item`, and combine those of the rows that are complete."""
    items, starts = int32s(items_ptr, end_item, 3), int32s(starts_ptr, 1, num_rows + 1)[0]
    num_kv_heads, head_dim = keys.num_kv_heads, keys.head_dim
    num_heads = num_kv_heads * group
    slots_ptr, following_ptr, spare_ptr = scratch_ptr, scratch_ptr + 8 * SPLIT, scratch_ptr + 16 * SPLIT
    scores_ptr = spare_ptr + 4 * SPARE_FLOATS
    matrix_ptr = scores_ptr + 4 * num_heads * SPLIT
    list_slots(
        pages_ptr + 4 * items[first_item, 0] * pages_stride, page_size, items[first_item, 1],
        items[first_item, 2], slots_ptr,
    )  # fmt: skip
    for item in range(first_item, end_item):
        row, count, num_following = np.int64(items[item, 0]), items[item, 2] - items[item, 1], 0
        # While a part of the matrices is made, a part of what is read next is fetched.
        num_parts = num_kv_heads * ((count + LANES - 1) // LANES)
        part = 0
        for kv_head in range(num_kv_heads):
            for start in range(0, count, LANES):
                first, part = count * part // num_parts, part + 1
                prefetch_slots(values, slots_ptr, first, count * part // num_parts)
                load_keys(keys, kv_head, slots_ptr + 8 * start, matrix_ptr + 4 * start, spare_ptr)
            head = kv_head * group
            multiply(
                q_ptr + 4 * (row * q_stride + head * head_dim), head_dim, matrix_ptr, SPLIT,
                scores_ptr + 4 * head * SPLIT, SPLIT, group, head_dim, count, 0,
            )  # fmt: skip
        statistics = floats(statistics_ptr + 8 * item * num_heads, num_heads, 2)
        for head in range(num_heads):
            peak, total = weigh(scores_ptr + 4 * head * SPLIT, count, scale, softcap)
            statistics[head, 0], statistics[head, 1] = peak, total
        if item + 1 < end_item:
            list_slots(
                pages_ptr + 4 * items[item + 1, 0] * pages_stride, page_size, items[item + 1, 1],
                items[item + 1, 2], following_ptr,
            )  # fmt: skip
            num_following = items[item + 1, 2] - items[item + 1, 1]
        part = 0
        for kv_head in range(num_kv_heads):
            for start in range(0, count, LANES):
                first, part = num_following * part // num_parts, part + 1
                prefetch_slots(keys, following_ptr, first, num_following * part // num_parts)
                load_values(
                    values, kv_head, slots_ptr + 8 * start, min(LANES, count - start),
                    matrix_ptr + 4 * start * width, width,
                )  # fmt: skip
            head = kv_head * group
            multiply(
                scores_ptr + 4 * head * SPLIT, SPLIT, matrix_ptr, width,
                partial_ptr + 4 * (item * num_heads + head) * width, width, group, count, width, 0,
            )  # fmt: skip
        slots_ptr, following_ptr = following_ptr, slots_ptr
        if item + 1 == starts[row + 1] and starts[row] >= first_item:
            _combine(
                row, out_ptr + 4 * row * out_stride, num_heads, head_dim, sinks_ptr, starts_ptr, partial_ptr,
                statistics_ptr, width,
            )  # fmt: skip


@compiled()
def _combine(row, out_ptr, num_heads, head_dim, sinks_ptr, starts_ptr, partial_ptr, statistics_ptr, width):
    """Merge the results of a row's splits in their order."""
    starts = int32s(starts_ptr, 1, row + 2)[0]
    statistics = floats(statistics_ptr, starts[row + 1] * num_heads, 2)
    for head in range(num_heads):
        sums_ptr = out_ptr + 4 * head * head_dim
        peak, total = begin(sums_ptr, head_dim, sinks_ptr + 4 * head if sinks_ptr else 0)
        for split in range(starts[row], starts[row + 1]):
            place = split * num_heads + head
            peak, total = merge(
                peak, total, sums_ptr, head_dim, statistics[place, 0], statistics[place, 1],
                partial_ptr + 4 * place * width,
            )  # fmt: skip
        finish(total, sums_ptr, head_dim, sums_ptr)


class _Plan(NamedTuple):
    """What the layers of a step share: the splits, and addresses in `memory`."""

    splits: Tensor  # int32: items, then the first item of each row
    memory: Tensor
    items: int
    starts: int
    partial: int
    statistics: int
    chunks: int
    chunk_floats: int
    num_items: int
    num_chunks: int
    width: int


_scratch = Scratch()


def _plan(batch: AttentionBatch, num_heads: int, head_dim: int, window: int) -> _Plan:
    num_rows = batch.num_decode_rows
    num_items = sum(
        -(-length // SPLIT) - (max(0, length - window) // SPLIT if window else 0)
        for length in batch.host_lens()[1][:num_rows]
    )
    splits = torch.empty(3 * num_items + num_rows + 1, dtype=torch.int32)
    items = splits.data_ptr()
    starts = items + 12 * num_items
    _list_items(batch.context_lens.data_ptr(), num_rows, window, items, starts)
    num_chunks = min(num_items, _CHUNKS_PER_THREAD * get_num_threads())
    width, num_partial = padded(head_dim), num_items * num_heads
    chunk_floats = 4 * SPLIT + SPARE_FLOATS + num_heads * SPLIT + matrix_floats(head_dim)
    memory = _scratch.take(num_chunks * chunk_floats + num_partial * (width + 2))
    chunks = memory.data_ptr()
    partial = chunks + 4 * num_chunks * chunk_floats
    statistics = partial + 4 * num_partial * width
    return _Plan(
        splits, memory, items, starts, partial, statistics, chunks, chunk_floats, num_items, num_chunks, width
    )


def decode_attention(
    q: Tensor, kv: KVLayer, batch: AttentionBatch, out: Tensor, options: AttentionOptions
) -> None:
    scale, window, softcap, sinks = options
    num_rows, num_heads, head_dim = q.shape
    keys, values, *scales = kv.tensors
    key_scales, value_scales = scales or (keys, values)
    _, page_size, num_kv_heads, _ = keys.shape
    plan = batch.once(
        ("decode", "cpu", num_heads, head_dim, window), lambda: _plan(batch, num_heads, head_dim, window)
    )
    _decode_kernel(
        c_function(_decode_part, 28, 2).address,
        q.data_ptr(),
        q.stride(0),
        out.data_ptr(),
        out.stride(0),
        num_rows,
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
        0 if sinks is None else sinks.data_ptr(),
        *plan[2:],
        scale,
        softcap,
    )
