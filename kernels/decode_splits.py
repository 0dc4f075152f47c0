"""Work list of decode attention: rows divided into splits of keys, and the combination of their results.

The division of a row depends on its own length only, and its splits are added one after the other, in order,
with the same arithmetic in every program. So a program may compute the first splits of a row as one item,
which saves memory traffic when there is enough work for all, and no bit of the result depends on the batch.
"""

from kernels.dispatch import tl, triton

RECORD = 8  # int32 values per item of the list: 32 bytes, a sector of memory
_RECORD = tl.constexpr(RECORD)
NO_PEAK = tl.constexpr(-1.0e30)  # of no splits; finite, so that a difference of two is 0 and not NaN
_AT_ONCE = tl.constexpr(4)  # results that are loaded together


# Not specialized on values that change every step: that would compile another variant.
@triton.jit(
    do_not_specialize=["num_rows", "num_workers"],
    do_not_specialize_on_alignment=["query_start_ptr", "context_lens_ptr"],
)
def list_items_kernel(
    query_start_ptr,
    context_lens_ptr,
    work_ptr,
    arrived_ptr,
    num_rows,
    num_workers,
    NUM_KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """One program lists the items of all rows of one query: row, begin, end, context_len, split size, item,
    items, place.

    Long items come first, so that workers that take items in turn end at nearly the same time. The list ends
    with num_workers records of row -1. The results of a row's items are consecutive in memory; `place` is the
    first of them.
    """
    rows = tl.arange(0, ROWS_BLOCK)
    first = tl.load(query_start_ptr + rows, mask=rows < num_rows, other=0)
    beyond = tl.load(query_start_ptr + rows + 1, mask=rows < num_rows, other=0)
    lens = tl.load(context_lens_ptr + rows, mask=(rows < num_rows) & (beyond - first == 1), other=0)
    begins = lens * 0
    if WINDOW > 0:
        begins = tl.maximum(lens - WINDOW, 0) // BLOCK_N * BLOCK_N
    sizes = tl.maximum(tl.cdiv(lens - begins, SPLIT * MAX_SPLITS), 1) * SPLIT
    splits = tl.cdiv(lens - begins, sizes)
    # The first item of a row has as many splits as a worker's share of all. 256 rows of 587 keys take 0.87
    # times as long as with one item per split (H100, bf16, 32/8 heads of 128), 64 rows 0.96 times.
    # With fewer rows than workers only some would get a long item, and as many short ones as the others:
    # 16 rows of 8192 keys and 132 workers would end after 6 splits in place of 4.
    share = tl.sum(splits, 0) // num_workers
    if (num_rows < num_workers) & (share > 2):
        share = 1
    merged = tl.minimum(tl.maximum(share, 1), splits)
    items = tl.where(splits > 0, splits - merged + 1, 0)
    places = tl.cumsum(items, 0) - items
    # Kinds of items in the order of the list: several splits, one whole split, the rest of a row.
    several = (merged > 1).to(tl.int32)
    rest = ((lens - begins) % sizes > 0).to(tl.int32) * (items > several).to(tl.int32)
    whole = items - several - rest
    several_at = tl.cumsum(several, 0) - several
    whole_at = tl.sum(several, 0) + tl.cumsum(whole, 0) - whole
    rest_at = tl.sum(several + whole, 0) + tl.cumsum(rest, 0) - rest
    for item in range(0, tl.max(items, 0)):
        at = tl.where(item < several + whole, whole_at + item - several, rest_at)
        record = work_ptr + tl.where(item < several, several_at, at) * _RECORD
        there = item < items
        begin = begins + tl.where(item > 0, merged + item - 1, 0) * sizes
        tl.store(record, rows, mask=there)
        tl.store(record + 1, begin, mask=there)
        tl.store(record + 2, tl.minimum(begins + (merged + item) * sizes, lens), mask=there)
        tl.store(record + 3, lens, mask=there)
        tl.store(record + 4, sizes, mask=there)
        tl.store(record + 5, item, mask=there)
        tl.store(record + 6, items, mask=there)
        tl.store(record + 7, places, mask=there)
    end_ptr = work_ptr + tl.sum(items, 0) * _RECORD
    for first in range(0, num_workers, ROWS_BLOCK):
        tl.store(end_ptr + (first + rows) * _RECORD, -1, mask=first + rows < num_workers)
    for kv_head in range(0, NUM_KV_HEADS):
        tl.store(arrived_ptr + rows * NUM_KV_HEADS + kv_head, 0, mask=rows < num_rows)


@triton.jit
def add_split(acc, total, peak, split_acc, split_total, split_peak):
    """Return (acc, total, peak) of the splits so far and one more.

    acc [M, DIM_BLOCK], total, peak [M]: weighted values, sum of weights, largest exponent. The fused
    multiply-adds are explicit, so that the compiler cannot place them differently in different kernels.
    """
    new_peak = tl.maximum(peak, split_peak)
    old = tl.exp2(peak - new_peak)
    new = tl.exp2(split_peak - new_peak)
    total = tl.fma(total, old, split_total * new)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), split_acc * new[:, None])
    return acc, total, new_peak


@triton.jit
def add_halves(low, high, total, peak, split_low, split_high, split_total, split_peak):
    """Return (low, high, total, peak) as `add_split`, of values in two parts [n, M]."""
    new_low, new_total, new_peak = add_split(
        tl.trans(low), total, peak, tl.trans(split_low), split_total, split_peak
    )
    new_high, new_total, new_peak = add_split(
        tl.trans(high), total, peak, tl.trans(split_high), split_total, split_peak
    )
    return tl.trans(new_low), tl.trans(new_high), new_total, new_peak


@triton.jit
def combine_items(
    out_ptr,
    partial_ptr,
    statistics_ptr,
    first,
    num_items,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Write the attention [GROUP, HEAD_DIM] of a row's KV head from the results of its items.

    The loads bypass the first-level cache, which may be older than what another program has written.
    """
    member = tl.arange(0, MEMBERS)
    dim = tl.arange(0, DIM_BLOCK)
    inside = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    acc = tl.zeros([MEMBERS, DIM_BLOCK], tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    peak = tl.full([MEMBERS], NO_PEAK, tl.float32)
    for start in range(0, num_items, _AT_ONCE):
        for i in tl.static_range(_AT_ONCE):
            item = tl.where(member < GROUP, start + i, num_items)
            there = item < num_items
            place = (first + item * NUM_KV_HEADS).to(tl.int64) * GROUP + member
            acc, total, peak = add_split(
                acc,
                total,
                peak,
                tl.load(
                    partial_ptr + place[:, None] * HEAD_DIM + dim[None, :],
                    mask=there[:, None] & inside,
                    other=0.0,
                    cache_modifier=".cg",
                ),
                tl.load(statistics_ptr + place * 2 + 1, mask=there, other=0.0, cache_modifier=".cg"),
                tl.load(statistics_ptr + place * 2, mask=there, other=NO_PEAK, cache_modifier=".cg"),
            )
    result = acc / tl.where(member < GROUP, total, 1.0)[:, None]
    tl.store(
        out_ptr + member[:, None] * HEAD_DIM + dim[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=inside,
    )
