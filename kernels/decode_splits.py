"""Decode attention's work list: rows cut into splits of keys, and their results put together again."""

from kernels.dispatch import tl, triton

RECORD = 8  # int32 of the list for a split: 32 bytes, a sector of memory
_RECORD = tl.constexpr(RECORD)


# What changes from step to step must not choose another compiled variant.
@triton.jit(
    do_not_specialize=["num_rows", "num_workers"],
    do_not_specialize_on_alignment=["context_lens_ptr"],
)
def list_splits_kernel(
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
    """One program lists the splits of all rows: row, first key, end, context_len, split, splits, first place.

    Whole splits come first, so that workers that take turns along the list end at nearly the same time;
    after the last split stands, once for each of num_workers, a row of -1. A row's splits have consecutive
    places in the memory for partial results, from its first place on.
    """
    rows = tl.arange(0, ROWS_BLOCK)
    lens = tl.load(context_lens_ptr + rows, mask=rows < num_rows, other=0)
    begins = lens * 0
    if WINDOW > 0:
        begins = tl.maximum(lens - WINDOW, 0) // BLOCK_N * BLOCK_N
    sizes = tl.maximum(tl.cdiv(lens - begins, SPLIT * MAX_SPLITS), 1) * SPLIT
    splits = tl.cdiv(lens - begins, sizes)
    whole = (lens - begins) // sizes
    firsts = tl.cumsum(splits, 0) - splits
    num_whole = tl.sum(whole, 0)
    whole_places = tl.cumsum(whole, 0) - whole
    rest_places = num_whole + firsts - whole_places
    for split in range(0, tl.max(splits, 0)):
        record = work_ptr + tl.where(split < whole, whole_places + split, rest_places) * _RECORD
        there = split < splits
        begin = begins + split * sizes
        tl.store(record, rows, mask=there)
        tl.store(record + 1, begin, mask=there)
        tl.store(record + 2, tl.minimum(begin + sizes, lens), mask=there)
        tl.store(record + 3, lens, mask=there)
        tl.store(record + 4, split, mask=there)
        tl.store(record + 5, splits, mask=there)
        tl.store(record + 6, firsts, mask=there)
    end_ptr = work_ptr + tl.sum(splits, 0) * _RECORD
    for first in range(0, num_workers, ROWS_BLOCK):
        tl.store(end_ptr + (first + rows) * _RECORD, -1, mask=first + rows < num_workers)
    for kv_head in range(0, NUM_KV_HEADS):
        tl.store(arrived_ptr + rows * NUM_KV_HEADS + kv_head, 0, mask=rows < num_rows)


@triton.jit
def combine_splits(
    out_ptr,
    partial_ptr,
    statistics_ptr,
    first_item,
    num_splits,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    COMBINE: tl.constexpr,
):
    """Write the attention [GROUP, HEAD_DIM] of a row's KV head from the results of its splits.

    The loads pass by the first-level cache, which may hold what another program has since written.
    """
    member = tl.arange(0, MEMBERS)
    dim = tl.arange(0, DIM_BLOCK)
    split = tl.arange(0, MAX_SPLITS)
    place = ((first_item + split * NUM_KV_HEADS).to(tl.int64) * GROUP)[:, None] + member[None, :]
    there = (split < num_splits)[:, None] & (member < GROUP)[None, :]
    peaks = tl.load(statistics_ptr + place * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(statistics_ptr + place * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
    peak = tl.where(member < GROUP, tl.max(peaks, 0), 0.0)
    total = tl.sum(totals * tl.exp2(peaks - peak[None, :]), 0)
    acc = tl.zeros([MEMBERS, DIM_BLOCK], tl.float32)
    for first in range(0, num_splits, COMBINE):
        some = first + tl.arange(0, COMBINE)
        row = ((first_item + some * NUM_KV_HEADS).to(tl.int64) * GROUP)[:, None] + member[None, :]
        valid = (some < num_splits)[:, None] & (member < GROUP)[None, :]
        exponent = tl.load(statistics_ptr + row * 2, mask=valid, other=float("-inf"), cache_modifier=".cg")
        values = tl.load(
            partial_ptr + row[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=valid[:, :, None] & (dim < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        acc += tl.sum(values * tl.exp2(exponent - peak[None, :])[:, :, None], 0)
    result = acc / tl.where(member < GROUP, total, 1.0)[:, None]
    tl.store(
        out_ptr + member[:, None] * HEAD_DIM + dim[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=(member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :],
    )
