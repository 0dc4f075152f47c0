"""Attention of a step's queries over keys and values that lie in pages: decode rows and prefill rows."""

import torch

from kernels.attention_batch import AttentionBatch, AttentionOptions
from kernels.decode_attention import decode_attention
from kernels.kv_layer import KVLayer
from kernels.prefill_attention import prefill_attention

__all__ = ["AttentionBatch", "AttentionOptions", "paged_attention"]


def paged_attention(
    q: torch.Tensor,
    kv: KVLayer,
    batch: AttentionBatch,
    options: AttentionOptions,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention of every query over its row's keys, [num_tokens, num_heads, head_dim].

    q [num_tokens, num_heads, head_dim] may be a view of a fused projection; `kv` holds this step's keys and
    values already; num_heads is a multiple of num_kv_heads. Query i of a row is at position context_len -
    query_len + i. `out`, if given, takes the result.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decode = batch.num_decode_rows
    if decode:
        decode_attention(q[:decode], kv, batch, out[:decode], options)
    if decode < q.shape[0] or batch.num_rows is not None:
        prefill_attention(q, kv, batch, out, options)
    return out
