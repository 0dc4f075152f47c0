"""Causal attention of rows with several queries, over keys and values in pages."""

from typing import NamedTuple

import torch

from kernels.attention_batch import AttentionBatch
from kernels.dispatch import dispatch

_BLOCK = 128  # queries at a time; 64 to 256 are within 10 %, a whole prompt of 512 takes 1.5 times as long
_MAX_SCORES = 4 << 20  # elements of the explicit score matrix


class _Row(NamedTuple):
    """One row of the step. Its visible keys are listed from the newest to the oldest.

    In that order query i and key j are `i + j - (num_queries - 1)` positions apart: the mask is constant
    along anti-diagonals, and a vector viewed with strides (1, 1) is the whole matrix.
    """

    tokens: slice  # of q
    num_queries: int
    key_index: torch.Tensor  # [num_kv_heads * num_keys] int32 into the cache seen as [slots * heads, :]
    bias: torch.Tensor  # [num_queries + num_keys] fp32: 0 where visible, else -inf
    distance: torch.Tensor  # [num_queries + num_keys] fp32: key position - query position


def prefill_attention_torch(
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
    """Write the attention of the rows after a batch's decode rows to out; arguments as in `paged_attention`.

    q, out [num_tokens, num_heads, head_dim] hold all tokens of the step. Computed in fp32: without hardware
    for 16-bit products those are slower by far.
    """
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    num_heads = q.shape[1]
    group = num_heads // num_kv_heads
    rows = batch.once(
        ("prefill", page_size, num_kv_heads, window), lambda: _plan(batch, page_size, num_kv_heads, window)
    )
    keys_table, values_table = k_cache.view(-1, head_dim), v_cache.view(-1, head_dim)
    for row in rows:
        n = row.num_queries
        # KV heads are the batch, the query heads of a group share their keys through a stride of 0.
        queries = q[row.tokens].view(n, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).float()
        result = out[row.tokens].view(n, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        shape = (num_kv_heads, group, -1, head_dim)
        keys, values = (
            table.index_select(0, row.key_index).float().view(num_kv_heads, 1, -1, head_dim).expand(shape)
            for table in (keys_table, values_table)
        )
        num_keys = keys.shape[2]
        bias = row.bias.expand(num_kv_heads, group, -1)
        if alibi_slopes is not None:
            bias = bias + alibi_slopes.view(num_kv_heads, group, 1) * row.distance
        block = min(_BLOCK, max(1, _MAX_SCORES // (num_heads * num_keys))) if softcap else _BLOCK
        for begin in range(0, n, block):
            end = min(begin + block, n)
            newest = n - end
            oldest = min(num_keys, n - begin + window - 1) if window else num_keys
            k, v = keys[:, :, newest:oldest], values[:, :, newest:oldest]
            mask = bias[..., begin + newest :].as_strided(
                (num_kv_heads, group, end - begin, oldest - newest), (*bias.stride()[:2], 1, 1)
            )
            attend = _attend_softcapped if softcap else _attend
            result[:, :, begin:end] = attend(queries[:, :, begin:end], k, v, mask, scale, softcap)


def _attend(q, k, v, bias, scale, _softcap):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)


def _attend_softcapped(q, k, v, bias, scale, softcap):
    scores = torch.matmul(q, k.transpose(2, 3)).mul_(scale / softcap).tanh_().mul_(softcap)
    return torch.matmul(scores.add_(bias).softmax(-1), v)


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
                distance=-gap.float(),
            )
        )
        start += n
    return rows


prefill_attention = dispatch(prefill_attention_torch, prefill_attention_torch)
