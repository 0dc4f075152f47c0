"""Rotary position embedding (Su et al., 2021) of q and k, fused with writing k and v into their pages."""

import torch

from kernels.dispatch import dispatch


def rope_kv_write_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Rotate q in place, rotate k, and write k and v to their slots; k itself is left undefined.

    q [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]; all may be views of one
    fused projection (only the last dimension must be contiguous). cos_sin [max_position, 2, rotary_dim / 2]
    fp32: the first rotary_dim <= head_dim elements of a head are rotated, element i together with
    i + rotary_dim / 2. positions [num_tokens] int64; k_cache, v_cache [num_pages, page_size, num_kv_heads,
    head_dim]; slot_mapping [num_tokens] int64 = page * page_size + offset, or negative: not written.
    """
    table = cos_sin[positions].unsqueeze(1)  # [num_tokens, 1, 2, rotary_dim / 2]
    if _stand_side_by_side(q, k):
        heads = q.shape[1] + k.shape[1]
        _rotate(torch.as_strided(q, (q.shape[0], heads, q.shape[2]), q.stride()), table)
    else:
        _rotate(q, table)
        _rotate(k, table)
    if int(slot_mapping.min()) < 0:
        kept = (slot_mapping >= 0).nonzero().squeeze(1)
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)


def _stand_side_by_side(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether k's heads follow q's in memory, as in a fused projection: one rotation then serves both."""
    return (
        q.stride() == k.stride()
        and q.stride(1) == q.shape[2]
        and k.data_ptr() == q.data_ptr() + q.shape[1] * q.shape[2] * q.element_size()
    )


def _rotate(x: torch.Tensor, table: torch.Tensor) -> None:
    """Rotate x [num_tokens, heads, head_dim] in place; table [num_tokens, 1, 2, rotary_dim / 2] fp32."""
    cos, sin = table.unbind(2)
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = first * cos
    x[..., half : 2 * half] = (second * cos).addcmul_(first, sin)
    x[..., :half] = rotated.addcmul_(second, sin, value=-1)


rope_kv_write = dispatch(rope_kv_write_torch, rope_kv_write_torch)
