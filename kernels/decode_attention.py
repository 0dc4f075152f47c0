"""Attention of rows with one query each, over keys and values in pages.

Microseconds on an H200, bfloat16, 32/8 heads of 128, in a CUDA graph (pages of 16 tokens):

    rows x keys     1 x 576   16 x 576   64 x 576   256 x 576   1 x 8192   256 x 8192
    16 bits             9.5         16         49         147         22         1940
    fp8                 8.0         12         33          85         20         1040
    int8                9.8         14         39          99         24         1240
    int4               10.6         15         45         123         24         1560

On NVIDIA GPUs quantized keys and values are widened to float16, which holds those of fp8 exactly and the
others with three more bits than bfloat16: as bfloat16, by conversions of the compiler, 256 x 576 take 155
(fp8), 194 (int8) and 176 (int4).
"""

from functools import cache
from typing import NamedTuple

import torch

from kernels.attention_batch import AttentionBatch, AttentionOptions
from kernels.attention_tile import LOG2_E, attend_few, constants
from kernels.cpu import decode_attention as cpu
from kernels.cpu.kv_heads import KINDS
from kernels.decode_splits import NO_PEAK, RECORD, add_halves, combine_items, list_items_kernel
from kernels.dispatch import dispatch, tl, triton
from kernels.kv_layer import KVLayer
from kernels.kv_values import half_elements, read_heads

_LOG2_E = tl.constexpr(LOG2_E)
_RECORD = tl.constexpr(RECORD)

# A row of up to _SPLIT * _MAX_SPLITS keys is reduced in splits of _SPLIT, a longer one in _MAX_SPLITS of
# equal size: how a row is reduced follows from its own length, never from the batch. Splits of 256 make a
# single row of 587 keys take 1.4 times as long.
_SPLIT = 128
_MAX_SPLITS = 32


class Launch(NamedTuple):
    """Launch parameters: keys per tile, programs per multiprocessor, compiler options."""

    block_n: int
    programs_per_sm: int
    num_warps: int
    num_stages: int


def launch_shape(dim_block: int, itemsize: int) -> Launch:
    """Return the launch for a head dimension (rounded up to a power of 2) and the bytes of a query's element.

    A warp with a tile of its own never waits for another. Of 13 launches on an H200 (bf16, 32/8 heads of 128,
    256 rows of 576 keys) this is the fastest with 16 bits and int4, at 95 % of the bandwidth of a copy with
    the former; in fp8 and int8 tiles of 64 keys take 0.98 and 0.95 times as long.
    """
    if itemsize == 4:
        return Launch(32, 4, 4, 1)
    return Launch(32, 8, 1, 2) if dim_block <= 128 else Launch(32, 8, 2, 2)


_MAX_PART_BYTES = 2 << 20  # gathered keys stay in the cache until the product reads them
# Padding allowed in a part: this share of its size, or as much as costs less than the calls of another part.
_MAX_PADDING = 1 / 8
_FREE_PADDING_TOKENS = 512


class _Part(NamedTuple):
    """Decode rows of similar length, computed together over `length` positions each, whole pages."""

    rows: slice | torch.Tensor  # of q
    num_rows: int
    length: int
    pages: torch.Tensor  # [num_rows * pages per row] int32; past a row's end its last page again
    # [num_rows * num_heads * length] int32 into the values as [slots * kv heads, :]
    value_index: torch.Tensor
    bags: torch.Tensor  # [num_rows * num_heads] int32: where each head starts in value_index
    first_hidden: int  # positions before it are visible in all rows
    hidden: torch.Tensor  # [num_rows, 1, length - first_hidden] bool


class _Buffers(NamedTuple):
    """Memory that all parts and layers of a step reuse; fresh memory costs page faults."""

    queries: torch.Tensor  # [max rows, num_kv_heads, padded group, head_dim] fp32; padding stays zero
    pages: torch.Tensor  # keys of a part, in the cache's dtype
    keys: torch.Tensor  # [max rows * num_kv_heads * max length, head_dim] fp32
    scores: torch.Tensor


# Not specialized on values that change every step: that would compile another variant.
@triton.jit(
    do_not_specialize=["page_table_stride"],
    do_not_specialize_on_alignment=["page_table_ptr"],
)
def _decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    out_ptr,
    partial_ptr,
    statistics_ptr,
    arrived_ptr,
    work_ptr,
    page_table_ptr,
    sinks_ptr,
    scale,
    softcap,
    value_scale,
    q_stride,
    out_stride,
    page_table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    MEMBERS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    KV_KIND: tl.constexpr,
    STORED: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    USE_PTX: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """NUM_KV_HEADS programs form a worker; workers take items in turn, so the grid depends on no length.

    Flash-decoding (Dao, Haziza, Massa and Sizov, 2023). A row's only item writes the output itself; of
    several, the program that ends last combines them, in their order. A sink belongs to the first item.
    """
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    member = tl.arange(0, GROUP_BLOCK)
    low_dim = half_elements(0, KV_KIND, DIM_BLOCK)[:, None]
    high_dim = half_elements(1, KV_KIND, DIM_BLOCK)[:, None]
    low_place = member[None, :] * HEAD_DIM + low_dim
    high_place = member[None, :] * HEAD_DIM + high_dim
    in_low = (member < GROUP)[None, :] & (low_dim < HEAD_DIM)
    in_high = (member < GROUP)[None, :] & (high_dim < HEAD_DIM)
    factor = scale * _LOG2_E
    k_head = k_cache_ptr + kv_head * STORED
    v_head = v_cache_ptr + kv_head * STORED
    k_scales = k_scales_ptr + kv_head * NUM_SCALES
    v_scales = v_scales_ptr + kv_head * NUM_SCALES
    record = work_ptr + tl.program_id(0) // NUM_KV_HEADS * _RECORD
    row = tl.load(record)
    while row >= 0:
        begin = tl.load(record + 1)
        end = tl.load(record + 2)
        context_len = tl.load(record + 3)
        split_size = tl.load(record + 4)
        item = tl.load(record + 5)
        row_items = tl.load(record + 6)
        first = tl.load(record + 7)
        record += tl.num_programs(0) // NUM_KV_HEADS * _RECORD
        next_row = tl.load(record)  # loaded while this item is computed

        q_row = q_ptr + row.to(tl.int64) * q_stride + kv_head * GROUP * HEAD_DIM
        low_q = tl.load(q_row + low_place, mask=in_low, other=0.0)
        high_q = tl.load(q_row + high_place, mask=in_high, other=0.0)
        if USE_PTX:
            low_q = low_q.to(tl.float16)
            high_q = high_q.to(tl.float16)
        position = tl.zeros([GROUP_BLOCK], tl.int32) + (context_len - 1)
        none = tl.zeros([DIM_BLOCK // 2, GROUP_BLOCK], tl.float32)
        low, high, item_low, item_high = none, none, none, none
        total = tl.zeros([GROUP_BLOCK], tl.float32)
        peak = tl.full([GROUP_BLOCK], NO_PEAK, tl.float32)
        item_total, item_peak = total, peak
        if SINKS:
            sink = tl.load(sinks_ptr + kv_head * GROUP + member, mask=member < GROUP, other=0.0) * _LOG2_E
            item_total = tl.where(item == 0, 1.0, item_total)
            item_peak = tl.where(item == 0, sink, item_peak)
        pages = page_table_ptr + row.to(tl.int64) * page_table_stride
        # Without a window only the last tile needs a mask.
        last = end if WINDOW > 0 else end - (end - begin) % BLOCK_N
        for start in range(begin, last, BLOCK_N):
            low, high, total, peak = attend_few(
                low, high, total, peak, low_q, high_q, position, start, end, pages, k_head, v_head,
                k_scales, v_scales, factor, softcap,
                NUM_KV_HEADS, HEAD_DIM, DIM_BLOCK, PAGE_SIZE, WINDOW, SOFTCAP,
                KV_KIND, STORED, NUM_SCALES, USE_PTX, WINDOW > 0, BLOCK_N,
            )  # fmt: skip
            if (start + BLOCK_N - begin) % split_size == 0:
                item_low, item_high, item_total, item_peak = add_halves(
                    item_low, item_high, item_total, item_peak, low, high, total, peak
                )
                low, high = none, none
                total = tl.zeros([GROUP_BLOCK], tl.float32)
                peak = tl.full([GROUP_BLOCK], NO_PEAK, tl.float32)
        for start in range(last, end, BLOCK_N):
            low, high, total, peak = attend_few(
                low, high, total, peak, low_q, high_q, position, start, end, pages, k_head, v_head,
                k_scales, v_scales, factor, softcap,
                NUM_KV_HEADS, HEAD_DIM, DIM_BLOCK, PAGE_SIZE, WINDOW, SOFTCAP,
                KV_KIND, STORED, NUM_SCALES, USE_PTX, True, BLOCK_N,
            )  # fmt: skip
        low, high, total, peak = add_halves(
            item_low, item_high, item_total, item_peak, low, high, total, peak
        )
        if KV_KIND == "fp8":
            low *= value_scale
            high *= value_scale

        out_row = out_ptr + row.to(tl.int64) * out_stride + kv_head * GROUP * HEAD_DIM
        if row_items == 1:
            dtype: tl.constexpr = out_ptr.dtype.element_ty
            tl.store(out_row + low_place, (low / total[None, :]).to(dtype), mask=in_low)
            tl.store(out_row + high_place, (high / total[None, :]).to(dtype), mask=in_high)
        else:
            place = ((first + item).to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP
            tl.store(partial_ptr + place * HEAD_DIM + low_place, low, mask=in_low)
            tl.store(partial_ptr + place * HEAD_DIM + high_place, high, mask=in_high)
            tl.store(statistics_ptr + (place + member) * 2, peak, mask=member < GROUP)
            tl.store(statistics_ptr + (place + member) * 2 + 1, total, mask=member < GROUP)
            tl.debug_barrier()  # all stores of this program become visible before its arrival
            arrived = arrived_ptr + row * NUM_KV_HEADS + kv_head
            if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == row_items - 1:
                tl.store(arrived, 0)  # ready for the next layer
                combine_items(
                    out_row, partial_ptr, statistics_ptr, first * NUM_KV_HEADS + kv_head, row_items,
                    NUM_KV_HEADS, GROUP, MEMBERS, HEAD_DIM, DIM_BLOCK,
                )  # fmt: skip
        row = next_row


def decode_attention_triton(
    q: torch.Tensor,
    kv: KVLayer,
    batch: AttentionBatch,
    out: torch.Tensor,
    options: AttentionOptions,
    launch: Launch | None = None,
) -> None:
    page_size, num_kv_heads = kv.keys.shape[1:3]
    num_rows, num_heads, head_dim = q.shape
    scale = options.scale * kv.key_scale
    of_tiles = constants(q, kv, options)
    assert out.stride(1) == head_dim
    launch = launch or launch_shape(of_tiles["DIM_BLOCK"], q.element_size())
    if batch.context_lens_host is None:
        longest = batch.page_table.shape[1] * page_size
    else:
        longest = max(batch.context_lens_host[:num_rows])
    max_splits = min(_MAX_SPLITS, triton.cdiv(longest, _SPLIT))
    num_workers = min(
        num_rows * max_splits, max(1, launch.programs_per_sm * _num_multiprocessors(q.device) // num_kv_heads)
    )
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()

    def plan() -> tuple[torch.Tensor, ...]:
        places = num_rows * max_splits * num_heads
        partial = torch.empty(places * head_dim, dtype=torch.float32, device=q.device)
        statistics = torch.empty(places * 2, dtype=torch.float32, device=q.device)
        arrived = torch.empty(num_rows * num_kv_heads, dtype=torch.int32, device=q.device)
        records = num_rows * max_splits + num_workers
        work = torch.empty(records * RECORD, dtype=torch.int32, device=q.device)
        list_items_kernel[(1,)](
            batch.query_start,
            batch.context_lens,
            work,
            arrived,
            num_rows,
            num_workers,
            NUM_KV_HEADS=num_kv_heads,
            WINDOW=options.window,
            ROWS_BLOCK=max(256, triton.next_power_of_2(num_rows)),
            BLOCK_N=launch.block_n,
            SPLIT=_SPLIT,
            MAX_SPLITS=_MAX_SPLITS,
        )
        return partial, statistics, arrived, work

    # Made again inside a capture, so that the graph lists the work of the lengths it is replayed with.
    scratch = batch.once(
        ("decode", "triton", num_kv_heads, num_heads, head_dim, options.window, launch, capturing), plan
    )
    members = triton.next_power_of_2(of_tiles["GROUP"])
    _decode_kernel[(num_workers * num_kv_heads,)](
        q,
        *kv.pointers(),
        out,
        *scratch,
        batch.page_table,
        options.sinks if options.sinks is not None else q,
        scale,
        options.softcap / scale,
        kv.value_scale,
        q.stride(0),
        out.stride(0),
        batch.page_table.stride(0),
        **of_tiles,
        USE_PTX=_uses_ptx(q, kv),
        GROUP_BLOCK=max(8, members),  # a matrix unit's columns
        MEMBERS=members,
        BLOCK_N=launch.block_n,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def _uses_ptx(q: torch.Tensor, kv: KVLayer) -> bool:
    """Return True if quantized keys and values are widened to float16 by PTX, two at a time."""
    on_nvidia = q.is_cuda and torch.version.hip is None and q.element_size() == 2
    return on_nvidia and kv.kind != "float" and q.shape[2] % 2 == 0


@cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # in the interpreter: enough that workers take turns
    return torch.cuda.get_device_properties(device).multi_processor_count


def decode_attention_torch(
    q: torch.Tensor,
    kv: KVLayer,
    batch: AttentionBatch,
    out: torch.Tensor,
    options: AttentionOptions,
) -> None:
    """Write the attention of a batch's decode rows to out; arguments as in `paged_attention`.

    q, out [num_decode_rows, num_heads, head_dim].

    Keys are gathered page by page and laid out head by head, so that all heads of a part are one batched
    product; values are summed where they lie, since a weighted sum of table rows is what embedding_bag
    computes. scaled_dot_product_attention over keys and values gathered in groups of the best size takes 1.2
    to 1.4 times as long (16 rows, 9/3 heads of 64, context 128 and 512, AVX2): its products with the few
    queries of a group run at a tenth of the peak.
    """
    page_size, num_kv_heads = kv.keys.shape[1:3]
    num_heads, head_dim = q.shape[1:]
    group = num_heads // num_kv_heads
    parts, buffers = batch.once(
        ("decode", page_size, num_kv_heads, num_heads, options.window),
        lambda: _plan(batch, kv, head_dim, num_heads, options.window),
    )
    padded = buffers.queries.shape[2]
    for part in parts:
        n, length = part.num_rows, part.length
        queries = buffers.queries[:n]
        queries[:, :, :group].copy_(q[part.rows].view(n, num_kv_heads, group, head_dim))
        keys = buffers.keys[: n * num_kv_heads * length].view(n, num_kv_heads, length, head_dim)
        if kv.kind == "float":
            pages = buffers.pages[: part.pages.shape[0]]
            torch.index_select(kv.keys, 0, part.pages, out=pages)
            keys.copy_(pages.view(n, length, num_kv_heads, head_dim).transpose(1, 2))
        else:
            index = _head_index(part, num_kv_heads)
            keys.copy_(read_heads(kv.keys, kv.key_scales, index, head_dim).view_as(keys))
        scores = buffers.scores[: n * num_kv_heads * padded * length].view(-1, padded, length)
        torch.baddbmm(
            scores,
            queries.view(-1, padded, head_dim),
            keys.view(-1, length, head_dim).transpose(1, 2),
            beta=0,
            alpha=options.scale * kv.key_scale,
            out=scores,
        )
        if options.softcap:
            scores.div_(options.softcap).tanh_().mul_(options.softcap)
        by_group = scores.view(n, num_kv_heads, padded, length)[:, :, :group]
        if part.first_hidden < length:
            by_group[..., part.first_hidden :].masked_fill_(part.hidden.unsqueeze(1), float("-inf"))
        if options.sinks is None:
            weights = by_group.softmax(-1)
        else:
            sinks = options.sinks.view(num_kv_heads, group, 1)
            weights = (by_group - torch.logaddexp(by_group.logsumexp(-1, keepdim=True), sinks)).exp_()
        if kv.values.dtype == q.dtype:
            weights = weights.to(q.dtype)
            table = kv.values.view(-1, head_dim)
            summed = torch.embedding_bag(
                table, part.value_index, part.bags, False, 0, False, weights.view(-1)
            )[0]
        else:
            index = _head_index(part, num_kv_heads)
            values = read_heads(kv.values, kv.value_scales, index, head_dim).view_as(keys)
            summed = torch.matmul(weights, values).mul_(kv.value_scale)
        out[part.rows] = summed.view(n, num_heads, head_dim).to(out.dtype)


def _plan(
    batch: AttentionBatch, kv: KVLayer, head_dim: int, num_heads: int, window: int
) -> tuple[list[_Part], _Buffers]:
    page_size, num_kv_heads = kv.keys.shape[1:3]
    lengths = batch.host_lens()[1][: batch.num_decode_rows]
    spans = [
        (max(0, length - window) // page_size if window else 0, -(-length // page_size)) for length in lengths
    ]
    parts = [
        _make_part(batch, rows, spans, lengths, window, page_size, num_kv_heads, num_heads)
        for rows in _group_by_length(spans, page_size, page_size * num_kv_heads * head_dim * 4)
    ]
    group = num_heads // num_kv_heads
    # Products with 3 or 7 rows take 1.2 times as long as those with 4 or 8 (MKL).
    padded = group + 1 if group % 4 == 3 else group
    units = max(part.num_rows * part.length for part in parts) * num_kv_heads
    buffers = _Buffers(
        queries=torch.zeros(max(part.num_rows for part in parts), num_kv_heads, padded, head_dim),
        pages=kv.keys.new_empty(units // num_kv_heads // page_size, *kv.keys.shape[1:]),
        keys=torch.empty(units, head_dim),
        scores=torch.empty(units * padded),
    )
    return parts, buffers


def _head_index(part: _Part, num_kv_heads: int) -> torch.Tensor:
    """Return the index of each KV head of a part, [num_rows * num_kv_heads * length], for `read_heads`."""
    return part.value_index.view(part.num_rows, num_kv_heads, -1, part.length)[:, :, 0].flatten()


def _group_by_length(spans: list[tuple[int, int]], page_size: int, page_bytes: int) -> list[list[int]]:
    """Divide rows, given as (first page, end page), into lists of row numbers of similar length."""
    num_pages = [end - first for first, end in spans]
    groups: list[list[int]] = []
    padding = 0
    for row in sorted(range(len(spans)), key=num_pages.__getitem__, reverse=True):
        if groups:
            longest = num_pages[groups[-1][0]]
            size = (len(groups[-1]) + 1) * longest
            padding += longest - num_pages[row]
            few = padding <= max(_FREE_PADDING_TOKENS / page_size, size * _MAX_PADDING)
            if few and size * page_bytes <= _MAX_PART_BYTES:
                groups[-1].append(row)
                continue
        groups.append([row])
        padding = 0
    return [sorted(rows) for rows in groups]


def _make_part(
    batch: AttentionBatch,
    rows: list[int],
    spans: list[tuple[int, int]],
    lengths: list[int],
    window: int,
    page_size: int,
    num_kv_heads: int,
    num_heads: int,
) -> _Part:
    n = len(rows)
    num_pages = max(spans[row][1] - spans[row][0] for row in rows)
    length = num_pages * page_size
    consecutive = rows[-1] - rows[0] == n - 1
    row_index = slice(rows[0], rows[-1] + 1) if consecutive else torch.tensor(rows)
    first_page, end_page, context_len = (
        torch.tensor(column).unsqueeze(1)
        for column in zip(*((*spans[row], lengths[row]) for row in rows), strict=True)
    )
    page_numbers = torch.minimum(first_page + torch.arange(num_pages), end_page - 1)
    pages = batch.page_table[row_index].gather(1, page_numbers)  # [n, num_pages] int32
    distance = first_page * page_size + torch.arange(length) - context_len + 1  # [n, length]
    hidden = distance > 0
    if window:
        hidden |= distance <= -window
    slots = (pages.unsqueeze(2) * page_size + torch.arange(page_size, dtype=torch.int32)).view(n, length)
    # A hidden value has weight 0, but it may be NaN: read the last visible one instead.
    last = (context_len - 1 - first_page * page_size).clamp_(max=length - 1)
    slots = torch.where(hidden, slots.gather(1, last), slots)
    heads = torch.arange(num_kv_heads, dtype=torch.int32).view(1, -1, 1)
    value_index = slots.unsqueeze(1) * num_kv_heads + heads  # [n, num_kv_heads, length]
    first_hidden = 0 if window else min(lengths[row] for row in rows)
    return _Part(
        rows=row_index,
        num_rows=n,
        length=length,
        pages=pages.view(-1),
        value_index=value_index.repeat_interleave(num_heads // num_kv_heads, dim=1).view(-1),
        bags=torch.arange(0, n * num_heads * length, length, dtype=torch.int32),
        first_hidden=first_hidden,
        hidden=hidden[:, None, first_hidden:],
    )


def decode_attention_cpu(
    q: torch.Tensor, kv: KVLayer, batch: AttentionBatch, out: torch.Tensor, options: AttentionOptions
) -> None:
    attend = cpu.decode_attention if kv.keys.dtype in KINDS else decode_attention_torch
    attend(q, kv, batch, out, options)


decode_attention = dispatch(decode_attention_triton, decode_attention_torch, decode_attention_cpu)
