"""Attention of a step's queries over keys and values that lie in pages: decode rows and prefill rows."""

from typing import TypedDict

import torch

from kernels.attention_batch import AttentionBatch
from kernels.decode_attention import decode_attention
from kernels.prefill_attention import prefill_attention

__all__ = ["AttentionBatch", "paged_attention"]


class _Options(TypedDict):
    scale: float
    window: int
    softcap: float
    alibi_slopes: torch.Tensor | None


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention of every query over its row's keys, [num_tokens, num_heads, head_dim].

    q [num_tokens, num_heads, head_dim] may be a view of a fused projection; k_cache, v_cache [num_pages,
    page_size, num_kv_heads, head_dim] hold this step's keys already; num_heads is a multiple of num_kv_heads.
    Query i of a row stands at position context_len - query_len + i. Scores are `scale * q·k`; softcap c > 0
    bounds them to `c * tanh(score / c)`; alibi_slopes [num_heads] fp32 add `slope * (key position - query
    position)` (Press et al., 2022); window w > 0 shows a query the last w keys, its own among them. `out`,
    if given, takes the result.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decode = batch.num_decode_rows
    options = _Options(scale=scale, window=window, softcap=softcap, alibi_slopes=alibi_slopes)
    if decode:
        decode_attention(q[:decode], k_cache, v_cache, batch, out[:decode], **options)
    if decode < q.shape[0] or batch.num_rows is not None:
        prefill_attention(q, k_cache, v_cache, batch, out, **options)
    return out
