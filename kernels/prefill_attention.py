"""Causal attention of rows with several queries, over keys and values in pages."""

from typing import NamedTuple

import torch

from kernels.attention_batch import AttentionBatch, AttentionOptions
from kernels.attention_tile import LOG2_E, attend_tile, constants
from kernels.cpu import prefill_attention as cpu
from kernels.cpu.kv_heads import KINDS
from kernels.dispatch import dispatch, tl, triton
from kernels.kv_layer import KVLayer
from kernels.kv_values import read_heads

_LOG2_E = tl.constexpr(LOG2_E)


class TileShape(NamedTuple):
    """Tile of a program (queries times heads of a group, keys) and compiler options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def tile_shape(dim_block: int, itemsize: int) -> TileShape:
    """Return the tile for a head dimension (rounded up to a power of 2) and the bytes of a value."""
    if itemsize == 4:  # exact fp32 products use no matrix unit; small accumulators stay in registers
        return TileShape(32, 32, 4, 1)
    # The fastest of 24 tiles on an H100 (8192 tokens, 32/8 heads): 400 and 417 TFLOP/s.
    if dim_block <= 64:
        return TileShape(64, 64, 4, 2)
    if dim_block <= 128:
        return TileShape(256, 64, 8, 3)
    return TileShape(128, 32, 8, 3)


_BLOCK = 128  # queries at a time; 64 to 256 are within 10 %, a whole prompt of 512 takes 1.5 times as long
_MAX_SCORES = 4 << 20  # elements of the explicit score matrix


class _Row(NamedTuple):
    """One row of the step, its visible keys in order from the newest to the oldest.

    In that order query i and key j are `i + j - (num_queries - 1)` positions apart: the mask is constant
    along anti-diagonals, and a vector viewed with strides (1, 1) is the whole matrix.
    """

    tokens: slice  # of q
    num_queries: int
    key_index: torch.Tensor  # [num_kv_heads * num_keys] int32 into the cache seen as [slots * heads, :]
    bias: torch.Tensor  # [num_queries + num_keys] fp32: 0 where visible, else -inf


# Not specialized on values that change every step: that would compile another variant.
@triton.jit(
    do_not_specialize=["first_row", "end_row", "num_tiles", "page_table_stride"],
    do_not_specialize_on_alignment=["page_table_ptr", "query_start_ptr", "context_lens_ptr", "num_rows_ptr"],
)
def _prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    out_ptr,
    page_table_ptr,
    query_start_ptr,
    context_lens_ptr,
    num_rows_ptr,
    sinks_ptr,
    first_row,
    end_row,
    num_tiles,
    scale,
    softcap,
    value_scale,
    q_stride,
    out_stride,
    page_table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    KV_KIND: tl.constexpr,
    STORED: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per KV head and tile of a row's queries, all heads of a group in the tile.

    Tiles of row r start at number `first token * GROUP // BLOCK_M + r`, counted from the first row: the host
    needs no table of them, and a row ends with at most one empty tile. Rows of one query are left out. Where
    the rows are COUNTED on the device, there are programs enough for the most there may be.
    """
    if COUNTED:
        end_row = tl.load(num_rows_ptr)
        num_tiles = tl.load(query_start_ptr + end_row) * GROUP // BLOCK_M + end_row
    # The tiles with the most keys start first, so that the last programs to end are short ones.
    tile = num_tiles - 1 - tl.program_id(0) // NUM_KV_HEADS
    if tile < 0:
        return
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    row = first_row
    beyond = end_row
    while beyond - row > 1:
        middle = (row + beyond) // 2
        tokens_before = tl.load(query_start_ptr + middle) - first_row
        if tokens_before * GROUP // BLOCK_M + middle - first_row <= tile:
            row = middle
        else:
            beyond = middle
    first_token = tl.load(query_start_ptr + row)
    num_queries = tl.load(query_start_ptr + row + 1) - first_token
    context_len = tl.load(context_lens_ptr + row)
    tile -= (first_token - first_row) * GROUP // BLOCK_M + row - first_row
    first_m = tile * BLOCK_M
    if (first_m >= num_queries * GROUP) | (num_queries == 1):
        return

    m = first_m + tl.arange(0, BLOCK_M)
    query = m // GROUP
    head = kv_head * GROUP + m % GROUP
    dim = tl.arange(0, DIM_BLOCK)
    inside = (query < num_queries)[:, None] & (dim < HEAD_DIM)[None, :]
    token = (first_token + query).to(tl.int64)
    columns = (head * HEAD_DIM)[:, None] + dim[None, :]
    q = tl.load(q_ptr + token[:, None] * q_stride + columns, mask=inside, other=0.0)
    past = context_len - num_queries
    position = past + query

    acc = tl.zeros([BLOCK_M, DIM_BLOCK], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if SINKS:
        total += 1.0
        peak = tl.load(sinks_ptr + head) * _LOG2_E
    pages = page_table_ptr + row.to(tl.int64) * page_table_stride
    k_head = k_cache_ptr + kv_head * STORED
    v_head = v_cache_ptr + kv_head * STORED
    k_scales = k_scales_ptr + kv_head * NUM_SCALES
    v_scales = v_scales_ptr + kv_head * NUM_SCALES
    factor = scale * _LOG2_E
    end = past + tl.minimum((first_m + BLOCK_M - 1) // GROUP, num_queries - 1) + 1
    # Tiles of keys before this are visible to all queries: only those on the diagonal need a mask.
    masked_from = (past + first_m // GROUP + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        masked_from = tl.maximum(past + first_m // GROUP + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    else:
        for start in range(0, masked_from, BLOCK_N):
            acc, total, peak = attend_tile(
                acc, total, peak, q, position, start, end, pages, k_head, v_head,
                k_scales, v_scales, factor, softcap,
                NUM_KV_HEADS, HEAD_DIM, DIM_BLOCK, PAGE_SIZE, WINDOW, SOFTCAP,
                KV_KIND, STORED, NUM_SCALES, False, BLOCK_N,
            )  # fmt: skip
    for start in range(masked_from, end, BLOCK_N):
        acc, total, peak = attend_tile(
            acc, total, peak, q, position, start, end, pages, k_head, v_head,
            k_scales, v_scales, factor, softcap,
            NUM_KV_HEADS, HEAD_DIM, DIM_BLOCK, PAGE_SIZE, WINDOW, SOFTCAP,
            KV_KIND, STORED, NUM_SCALES, True, BLOCK_N,
        )  # fmt: skip
    if KV_KIND == "fp8":
        acc = acc * value_scale
    result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token[:, None] * out_stride + columns, result, mask=inside)


def prefill_attention_triton(
    q: torch.Tensor,
    kv: KVLayer,
    batch: AttentionBatch,
    out: torch.Tensor,
    options: AttentionOptions,
    shape: TileShape | None = None,
) -> None:
    of_tiles = constants(q, kv, options)
    assert out.stride(1) == of_tiles["HEAD_DIM"]
    shape = shape or tile_shape(of_tiles["DIM_BLOCK"], q.element_size())
    is_counted = batch.num_rows is not None
    first_row, end_row = 0 if is_counted else batch.num_decode_rows, batch.context_lens.shape[0]
    # Decode rows have one token each, so first_row is also the number of tokens before the prefill rows.
    num_tiles = (q.shape[0] - first_row) * of_tiles["GROUP"] // shape.block_m + end_row - first_row
    scale = options.scale * kv.key_scale
    _prefill_kernel[(num_tiles * of_tiles["NUM_KV_HEADS"],)](
        q,
        *kv.pointers(),
        out,
        batch.page_table,
        batch.query_start,
        batch.context_lens,
        batch.num_rows if batch.num_rows is not None else batch.context_lens,
        options.sinks if options.sinks is not None else q,
        first_row,
        end_row,
        num_tiles,
        scale,
        options.softcap / scale,
        kv.value_scale,
        q.stride(0),
        out.stride(0),
        batch.page_table.stride(0),
        **of_tiles,
        COUNTED=is_counted,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


def prefill_attention_torch(
    q: torch.Tensor,
    kv: KVLayer,
    batch: AttentionBatch,
    out: torch.Tensor,
    options: AttentionOptions,
) -> None:
    """Write the attention of the rows after a batch's decode rows to out; arguments as in `paged_attention`.

    q, out [num_tokens, num_heads, head_dim] hold all tokens of the step. Computed in fp32: without hardware
    for 16-bit products those are slower by far.
    """
    options = options._replace(scale=options.scale * kv.key_scale)
    _, window, softcap, sinks = options
    page_size, num_kv_heads = kv.keys.shape[1:3]
    num_heads, head_dim = q.shape[1:]
    group = num_heads // num_kv_heads
    rows = batch.once(
        ("prefill", page_size, num_kv_heads, window), lambda: _plan(batch, page_size, num_kv_heads, window)
    )
    for row in rows:
        n = row.num_queries
        # KV heads are the batch, the query heads of a group share their keys through a stride of 0.
        queries = q[row.tokens].view(n, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).float()
        result = out[row.tokens].view(n, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        shape = (num_kv_heads, group, -1, head_dim)
        keys, values = (
            read_heads(*table, row.key_index, head_dim).view(num_kv_heads, 1, -1, head_dim).expand(shape)
            for table in ((kv.keys, kv.key_scales), (kv.values, kv.value_scales))
        )
        num_keys = keys.shape[2]
        bias = row.bias.expand(num_kv_heads, group, -1)
        explicit = bool(softcap) or sinks is not None
        block = min(_BLOCK, max(1, _MAX_SCORES // (num_heads * num_keys))) if explicit else _BLOCK
        for begin in range(0, n, block):
            end = min(begin + block, n)
            newest = n - end
            oldest = min(num_keys, n - begin + window - 1) if window else num_keys
            k, v = keys[:, :, newest:oldest], values[:, :, newest:oldest]
            mask = bias[..., begin + newest :].as_strided(
                (num_kv_heads, group, end - begin, oldest - newest), (*bias.stride()[:2], 1, 1)
            )
            attend = _attend_explicit if explicit else _attend
            result[:, :, begin:end] = attend(queries[:, :, begin:end], k, v, mask, options) * kv.value_scale


def _attend(q, k, v, bias, options):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=options.scale)


def _attend_explicit(q, k, v, bias, options):
    """Attend with a soft cap or sinks, which the library's function does not have."""
    scores = torch.matmul(q, k.transpose(2, 3)).mul_(options.scale)
    if options.softcap:
        scores.div_(options.softcap).tanh_().mul_(options.softcap)
    total = scores.add_(bias).logsumexp(-1, keepdim=True)
    if options.sinks is not None:
        total = torch.logaddexp(total, options.sinks.view(*q.shape[:2], 1, 1))
    return torch.matmul(scores.sub_(total).exp_(), v)


def _plan(batch: AttentionBatch, page_size: int, num_kv_heads: int, window: int) -> list[_Row]:
    query_lens, context_lens = batch.host_lens()
    heads = torch.arange(num_kv_heads, dtype=torch.int32).unsqueeze(1)
    rows = []
    start = batch.num_decode_rows
    for row in range(batch.num_decode_rows, len(query_lens)):
        n, length = query_lens[row], context_lens[row]
        first = max(0, length - n - window + 1) if window else 0
        position = torch.arange(length - 1, first - 1, -1)
        slot = batch.page_table[row][position // page_size] * page_size + position % page_size
        gap = torch.arange(1 - n, length - first + 1)
        hidden = (gap < 0) | (gap >= window) if window else gap < 0
        rows.append(
            _Row(
                tokens=slice(start, start + n),
                num_queries=n,
                key_index=(slot.to(torch.int32) * num_kv_heads + heads).view(-1),
                bias=torch.zeros(len(gap)).masked_fill_(hidden, float("-inf")),
            )
        )
        start += n
    return rows


def prefill_attention_cpu(
    q: torch.Tensor, kv: KVLayer, batch: AttentionBatch, out: torch.Tensor, options: AttentionOptions
) -> None:
    attend = cpu.prefill_attention if kv.keys.dtype in KINDS else prefill_attention_torch
    attend(q, kv, batch, out, options)


prefill_attention = dispatch(prefill_attention_triton, prefill_attention_torch, prefill_attention_cpu)
