"""Rotary position embedding (Su et al., 2021) of q and k, fused with writing k and v into their pages."""

import torch

from kernels.dispatch import dispatch, tl, triton
from kernels.kv_layer import KVLayer

_HEADS = 4  # heads per program


# Positions and slots may be rows of one staging tensor, aligned or not.
@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slot_mapping_ptr"])
def _rope_kv_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    angles_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    q_stride,
    k_stride,
    v_stride,
    num_q_heads,
    num_kv_heads,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One program per token and block of heads: first the blocks of q, then those of k with v."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    num_q_blocks = tl.cdiv(num_q_heads, HEADS)
    is_q = block < num_q_blocks
    angle = tl.arange(0, HALF_BLOCK)
    table = angles_ptr + token * (2 * HALF) + angle
    cos = tl.load(table, mask=angle < HALF, other=0.0)[None, :]
    sin = tl.load(table + HALF, mask=angle < HALF, other=0.0)[None, :]
    if is_q:
        head = (block * HEADS + tl.arange(0, HEADS))[:, None]
        inside = (head < num_q_heads) & (angle[None, :] < HALF)
        source = q_ptr + token * q_stride + head * HEAD_DIM + angle[None, :]
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        tl.store(source, (first * cos - second * sin).to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(source + HALF, (second * cos + first * sin).to(q_ptr.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slot_mapping_ptr + token)
        head = ((block - num_q_blocks) * HEADS + tl.arange(0, HEADS))[:, None]
        written = head < num_kv_heads
        target = (slot * num_kv_heads + head) * HEAD_DIM
        inside = written & (angle[None, :] < HALF)
        k_row = k_ptr + token * k_stride + head * HEAD_DIM
        first = tl.load(k_row + angle[None, :], mask=inside, other=0.0).to(tl.float32)
        second = tl.load(k_row + HALF + angle[None, :], mask=inside, other=0.0).to(tl.float32)
        k_target = k_cache_ptr + target + angle[None, :]
        dtype = k_cache_ptr.dtype.element_ty
        tl.store(k_target, (first * cos - second * sin).to(dtype), mask=inside)
        tl.store(k_target + HALF, (second * cos + first * sin).to(dtype), mask=inside)
        if REST_BLOCK > 0:
            rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
            in_rest = written & (rest < HEAD_DIM)
            tl.store(k_cache_ptr + target + rest, tl.load(k_row + rest, mask=in_rest), mask=in_rest)
        column = tl.arange(0, DIM_BLOCK)[None, :]
        in_head = written & (column < HEAD_DIM)
        value = tl.load(v_ptr + token * v_stride + head * HEAD_DIM + column, mask=in_head)
        tl.store(v_cache_ptr + target + column, value, mask=in_head)


def rope_kv_write_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    angles: torch.Tensor,
    kv: KVLayer,
    slot_mapping: torch.Tensor,
) -> None:
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    half = angles.shape[2]
    assert all(t.stride(2) == 1 and t.stride(1) == head_dim for t in (q, k, v))
    assert angles.is_contiguous() and kv.keys.is_contiguous() and kv.values.is_contiguous()
    if num_tokens == 0:
        return
    rest = head_dim - 2 * half
    _rope_kv_write_kernel[(num_tokens, triton.cdiv(num_q_heads, _HEADS) + triton.cdiv(num_kv_heads, _HEADS))](
        q,
        k,
        v,
        angles,
        *kv,
        slot_mapping,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        num_q_heads,
        num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        REST_BLOCK=triton.next_power_of_2(rest) if rest else 0,
        DIM_BLOCK=triton.next_power_of_2(head_dim),
        HEADS=_HEADS,
        num_warps=2,
    )


def rope_kv_write_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    angles: torch.Tensor,
    kv: KVLayer,
    slot_mapping: torch.Tensor,
) -> None:
    """Rotate q in place, rotate k, and write k and v to their slots; k itself is left undefined.

    q [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]; all may be views of one
    fused projection (the heads of one token must be contiguous). angles [num_tokens, 2, rotary_dim / 2] fp32
    holds cos and sin of each token's position: the first rotary_dim <= head_dim elements of a head are
    rotated, element i together with i + rotary_dim / 2. slot_mapping
    [num_tokens] int64 = page * page_size + offset.
    """
    if _stand_side_by_side(q, k):
        heads = q.shape[1] + k.shape[1]
        _rotate(torch.as_strided(q, (q.shape[0], heads, q.shape[2]), q.stride()), angles)
    else:
        _rotate(q, angles)
        _rotate(k, angles)
    kv.keys.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k)
    kv.values.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)


def _stand_side_by_side(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether k's heads follow q's in memory, as in a fused projection: one rotation then serves both."""
    return (
        q.stride() == k.stride()
        and q.stride(1) == q.shape[2]
        and k.data_ptr() == q.data_ptr() + q.shape[1] * q.shape[2] * q.element_size()
    )


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> None:
    """Rotate x [num_tokens, heads, head_dim] in place; angles [num_tokens, 2, rotary_dim / 2] fp32."""
    cos, sin = angles[:, :1], angles[:, 1:]  # [num_tokens, 1, rotary_dim / 2]
    half = angles.shape[2]
    first, second = x[..., :half], x[..., half : 2 * half]
    # The products are fp32, so a 16-bit result is rounded once.
    turned = (first * cos).addcmul_(second, sin, value=-1)
    torch.add(second * cos, first * sin, out=second)
    first.copy_(turned)


rope_kv_write = dispatch(rope_kv_write_triton, rope_kv_write_torch)
