"""Attention of rows with one query each, over keys and values in pages."""

from typing import NamedTuple

import torch

from kernels.attention_batch import AttentionBatch
from kernels.dispatch import dispatch

# Padded positions a part may have: this share of its size, or as much as one more part costs (about 20 us).
_MAX_PADDING = 1 / 8
_FREE_PADDING = 1024
_MAX_PART_BYTES = 4 << 20  # gathered keys stay in the last-level cache between gather and product


class _Part(NamedTuple):
    """Decode rows of similar length that are computed together, and buffers for one layer at a time.

    A unit is one KV head of one row. Units have `length` positions; those past a row's end repeat its last.
    """

    rows: torch.Tensor | slice  # which rows of q, longest first
    num_rows: int
    length: int
    shortest: int
    tail_bias: torch.Tensor  # [num_rows, 1, length - shortest] fp32: -inf past a row's end
    distance: torch.Tensor  # [num_rows, 1, length] fp32: key position - query position
    key_index: (
        torch.Tensor
    )  # [num_rows * num_kv_heads * length] int32 into the cache seen as [slots * heads, :]
    value_index: torch.Tensor  # the same for every query head
    bags: torch.Tensor  # [num_rows * num_heads] int32: where each query head starts in value_index


def decode_attention_torch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    out: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
) -> None:
    """Write the attention of a batch's decode rows to out; arguments as in `paged_attention`.

    q, out [num_decode_rows, num_heads, head_dim].

    Keys are gathered by (row, KV head, position), so that all units are one batched product. Values are
    summed where they lie: a weighted sum over table rows is what embedding_bag computes. On 2 AVX2 cores
    (16 rows, 512 tokens, 9/3 heads of 64, fp32) this takes 0.4 of the time of scaled_dot_product_attention
    over gathered keys and values, whose small products of 3 queries run at a tenth of the peak.
    """
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    num_heads = q.shape[1]
    group = num_heads // num_kv_heads
    parts = batch.once(
        ("decode", page_size, num_kv_heads, num_heads, window),
        lambda: _plan(batch, page_size, num_kv_heads, num_heads, head_dim, window),
    )
    keys_table, values_table = k_cache.view(-1, head_dim), v_cache.view(-1, head_dim)
    for part in parts:
        units = part.num_rows * num_kv_heads
        queries = q[part.rows].reshape(units, group, head_dim).float()
        keys = keys_table.index_select(0, part.key_index).float().view(units, part.length, head_dim)
        scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(scale)
        by_row = scores.view(part.num_rows, num_heads, part.length)
        if softcap:
            scores.div_(softcap).tanh_().mul_(softcap)
        if alibi_slopes is not None:
            by_row.addcmul_(alibi_slopes.view(1, num_heads, 1), part.distance)
        if part.shortest < part.length:
            by_row[..., part.shortest :].add_(part.tail_bias)
        weights = scores.softmax(-1).to(v_cache.dtype).view(-1)
        values = torch.embedding_bag(
            values_table, part.value_index, part.bags, False, 0, False, weights
        )[0]  # fmt: skip
        out[part.rows] = values.view(part.num_rows, num_heads, head_dim)


def _plan(
    batch: AttentionBatch, page_size: int, num_kv_heads: int, num_heads: int, head_dim: int, window: int
) -> list[_Part]:
    """Divide the decode rows into parts of similar length and make their index tensors."""
    lengths = batch.host_lens()[1][: batch.num_decode_rows]
    visible = [min(length, window) if window else length for length in lengths]
    order = sorted(range(len(visible)), key=visible.__getitem__, reverse=True)
    rows_of_parts: list[list[int]] = []
    padding = 0
    for row in order:
        if rows_of_parts:
            rows = rows_of_parts[-1]
            longest = visible[rows[0]]
            size = (len(rows) + 1) * longest * num_kv_heads
            padding += (longest - visible[row]) * num_kv_heads
            if padding <= max(_FREE_PADDING, size * _MAX_PADDING) and size * head_dim * 4 <= _MAX_PART_BYTES:
                rows.append(row)
                continue
        rows_of_parts.append([row])
        padding = 0
    return [
        _make_part(batch, sorted(rows), lengths, visible, page_size, num_kv_heads, num_heads)
        for rows in rows_of_parts
    ]


def _make_part(
    batch: AttentionBatch,
    rows: list[int],
    lengths: list[int],
    visible: list[int],
    page_size: int,
    num_kv_heads: int,
    num_heads: int,
) -> _Part:
    length, shortest = max(visible[row] for row in rows), min(visible[row] for row in rows)
    n = len(rows)
    consecutive = rows[-1] - rows[0] == n - 1
    row_index = slice(rows[0], rows[-1] + 1) if consecutive else torch.tensor(rows)
    first = torch.tensor([[lengths[row] - visible[row]] for row in rows], dtype=torch.int32)
    last = torch.tensor([[lengths[row] - 1] for row in rows], dtype=torch.int32)
    steps = torch.arange(length, dtype=torch.int32)
    position = torch.minimum(first + steps, last)  # [n, length]
    page = batch.page_table[row_index].gather(1, (position // page_size).to(torch.int64))
    slot = page * page_size + position % page_size
    heads = torch.arange(num_kv_heads, dtype=torch.int32).view(1, -1, 1)
    key_index = slot.unsqueeze(1) * num_kv_heads + heads  # [n, num_kv_heads, length]
    value_index = key_index.repeat_interleave(num_heads // num_kv_heads, dim=1)
    tail_bias = torch.zeros(n, 1, length - shortest).masked_fill_(
        (first + steps > last)[:, None, shortest:], float("-inf")
    )
    return _Part(
        rows=row_index,
        num_rows=n,
        length=length,
        shortest=shortest,
        tail_bias=tail_bias,
        distance=(position - last).unsqueeze(1).float(),
        key_index=key_index.view(-1),
        value_index=value_index.view(-1),
        bags=torch.arange(0, n * num_heads * length, length, dtype=torch.int32),
    )


decode_attention = dispatch(decode_attention_torch, decode_attention_torch)
