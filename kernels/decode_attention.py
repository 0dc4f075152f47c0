"""Attention of rows with one query each, over keys and values in pages."""

from typing import NamedTuple

import torch

from kernels.attention_batch import AttentionBatch
from kernels.dispatch import dispatch

_MAX_PART_BYTES = 2 << 20  # gathered keys stay in the cache until the product reads them
# Padding a part may have: this share of its size, or what costs less than the calls of one more part.
_MAX_PADDING = 1 / 8
_FREE_PADDING_TOKENS = 512


class _Part(NamedTuple):
    """Decode rows of similar length, computed together over `length` positions each, whole pages."""

    rows: slice | torch.Tensor  # of q
    num_rows: int
    length: int
    pages: torch.Tensor  # [num_rows * pages per row] int32; past a row's end its last page again
    value_index: torch.Tensor  # [num_rows * num_heads * length] int32 into v_cache as [slots * kv heads, :]
    bags: torch.Tensor  # [num_rows * num_heads] int32: where each head starts in value_index
    first_hidden: int  # positions before it are visible in all rows
    hidden: torch.Tensor  # [num_rows, 1, length - first_hidden] bool
    distance: torch.Tensor  # [num_rows, 1, length] fp32: key position - query position


class _Buffers(NamedTuple):
    """Memory that the parts and layers of a step use one after the other; fresh memory costs page faults."""

    queries: torch.Tensor  # [max rows, num_kv_heads, padded group, head_dim] fp32; padding stays zero
    pages: torch.Tensor  # keys of a part, in the cache's dtype
    keys: torch.Tensor  # [max rows * num_kv_heads * max length, head_dim] fp32
    scores: torch.Tensor


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

    Keys are gathered page by page and laid out head by head, so that all heads of a part are one batched
    product; values are summed where they lie, since a weighted sum of table rows is what embedding_bag
    computes. scaled_dot_product_attention over gathered keys and values takes 1.5 to 2 times as long: its
    products with the few queries of a group run at a tenth of the peak.
    """
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    num_heads = q.shape[1]
    group = num_heads // num_kv_heads
    parts, buffers = batch.once(
        ("decode", page_size, num_kv_heads, num_heads, window),
        lambda: _plan(batch, k_cache, num_heads, window),
    )
    padded = buffers.queries.shape[2]
    for part in parts:
        n, length = part.num_rows, part.length
        queries = buffers.queries[:n]
        queries[:, :, :group].copy_(q[part.rows].view(n, num_kv_heads, group, head_dim))
        pages = buffers.pages[: part.pages.shape[0]]
        torch.index_select(k_cache, 0, part.pages, out=pages)
        keys = buffers.keys[: n * num_kv_heads * length].view(n, num_kv_heads, length, head_dim)
        keys.copy_(pages.view(n, length, num_kv_heads, head_dim).transpose(1, 2))
        scores = buffers.scores[: n * num_kv_heads * padded * length].view(-1, padded, length)
        torch.baddbmm(
            scores,
            queries.view(-1, padded, head_dim),
            keys.view(-1, length, head_dim).transpose(1, 2),
            beta=0,
            alpha=scale,
            out=scores,
        )
        if softcap:
            scores.div_(softcap).tanh_().mul_(softcap)
        by_group = scores.view(n, num_kv_heads, padded, length)[:, :, :group]
        if alibi_slopes is not None:
            slopes = alibi_slopes.view(1, num_kv_heads, group, 1)
            by_group.addcmul_(slopes, part.distance.unsqueeze(1))
        if part.first_hidden < length:
            by_group[..., part.first_hidden :].masked_fill_(part.hidden.unsqueeze(1), float("-inf"))
        weights = by_group.softmax(-1).to(v_cache.dtype)
        values = torch.embedding_bag(
            v_cache.view(-1, head_dim), part.value_index, part.bags, False, 0, False, weights.view(-1)
        )
        out[part.rows] = values[0].view(n, num_heads, head_dim)


def _plan(
    batch: AttentionBatch, k_cache: torch.Tensor, num_heads: int, window: int
) -> tuple[list[_Part], _Buffers]:
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
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
        pages=k_cache.new_empty(units // num_kv_heads // page_size, *k_cache.shape[1:]),
        keys=torch.empty(units, head_dim),
        scores=torch.empty(units * padded),
    )
    return parts, buffers


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
    # A hidden value has weight 0, but it may be NaN: the last visible one stands in for it.
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
        distance=distance.unsqueeze(1).float(),
    )


decode_attention = dispatch(decode_attention_torch, decode_attention_torch)
