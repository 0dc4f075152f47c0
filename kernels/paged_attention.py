"""Attention of a step's queries over keys and values that lie in pages."""

from dataclasses import dataclass, field

import torch

from kernels.dispatch import dispatch


@dataclass(eq=False)
class AttentionBatch:
    """Where the queries of a step stand and where their keys and values lie: built once, used by all layers.

    A row is the part of a step that belongs to one sequence. Rows with exactly one query stand first.
    """

    page_table: torch.Tensor  # [num_rows, max_pages] int32; entries past a row's context are ignored
    query_start: torch.Tensor  # [num_rows + 1] int32: first token of each row
    context_lens: torch.Tensor  # [num_rows] int32: keys of each row, those of this step included
    slot_mapping: torch.Tensor  # [num_tokens] int64: where this step's keys and values are written
    num_decode_rows: int
    query_lens: list[int] | None = None
    context_lens_host: list[int] | None = None
    _plans: dict = field(default_factory=dict, repr=False)


def paged_attention_torch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention of every query over its row's keys, [num_tokens, num_heads, head_dim].

    q [num_tokens, num_heads, head_dim]; k_cache, v_cache [num_pages, page_size, num_kv_heads, head_dim],
    this step's keys already written. Query i of a row stands at position context_len - query_len + i.
    Scores are `scale * q·k`; softcap c > 0 bounds them to `c * tanh(score / c)`; alibi_slopes [num_heads]
    fp32 add `slope * (key position - query position)` (Press et al., 2022); window w > 0 lets a query see
    the last w keys only, its own among them.
    """
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    num_heads = q.shape[1]
    group = num_heads // num_kv_heads
    query_lens = batch.query_lens or batch.query_start.diff().tolist()
    context_lens = batch.context_lens_host or batch.context_lens.tolist()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    start = 0
    for row, (n, length) in enumerate(zip(query_lens, context_lens, strict=True)):
        pages = batch.page_table[row, : -(-length // page_size)]
        k = k_cache[pages].view(-1, num_kv_heads, head_dim)[:length]
        v = v_cache[pages].view(-1, num_kv_heads, head_dim)[:length]
        query_positions = torch.arange(length - n, length, device=q.device).unsqueeze(1)
        distance = torch.arange(length, device=q.device) - query_positions
        visible = distance <= 0
        if window:
            visible &= distance > -window
        # [num_kv_heads, group, n, head_dim] against [num_kv_heads, 1, length, head_dim]
        queries = q[start : start + n].view(n, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        scores = queries.float() @ k.float().permute(1, 2, 0).unsqueeze(1) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes is not None:
            scores += alibi_slopes.view(num_kv_heads, group, 1, 1) * distance
        probs = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        values = probs @ v.float().transpose(0, 1).unsqueeze(1)
        out[start : start + n] = values.permute(2, 0, 1, 3).reshape(n, num_heads, head_dim)
        start += n
    return out


paged_attention = dispatch(paged_attention_torch, paged_attention_torch)
