"""Rotary position embedding (Su et al., 2021) of q and k, fused with writing k and v into their pages.

Some models normalise each head of q and k before (QK norm, Henry et al., 2020): that is fused, too.
"""

from typing import NamedTuple

import torch

from kernels.cpu.rope_kv_write import rope_kv_write as rope_kv_write_cpu
from kernels.dispatch import dispatch, tl, triton
from kernels.kv_layer import KVLayer
from kernels.kv_values import store_heads, write_heads
from kernels.rms_norm import rms_norm_torch

_HEADS = 4  # heads per program


class QKNorm(NamedTuple):
    """RMSNorm of each head of q and k, as `rms_norm` computes it, with one weight [head_dim] for either.

    Or LayerNorm without bias, with a weight for each head: [num_heads, head_dim] and
    [num_kv_heads, head_dim]. It is computed in fp32 and rounded once.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float
    is_layer_norm: bool = False


@triton.jit
def _scaled(x, inverse, weight, DTYPE: tl.constexpr, LAYER_NORM: tl.constexpr):
    """Return x * inverse * weight as `rms_norm` or LayerNorm rounds it, in fp32."""
    x *= inverse
    if weight.dtype == DTYPE and not LAYER_NORM:
        x = x.to(DTYPE).to(tl.float32)
    return (x * weight.to(tl.float32)).to(DTYPE).to(tl.float32)


@triton.jit
def _load_pairs(heads, there, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the first and the second element of each rotated pair, [HEADS, HALF_BLOCK] each.

    Interleaved pairs are loaded as they lie and divided in registers: loads with a stride of 2 would need
    four times the instructions.
    """
    if INTERLEAVED:
        dim = tl.arange(0, 2 * HALF_BLOCK)[None, :]
        pairs = tl.load(heads + dim, mask=there & (dim < 2 * HALF), other=0.0)
        first, second = tl.split(tl.reshape(pairs, [pairs.shape[0], HALF_BLOCK, 2]))
    else:
        angle = tl.arange(0, HALF_BLOCK)[None, :]
        first = tl.load(heads + angle, mask=there & (angle < HALF), other=0.0)
        second = tl.load(heads + HALF + angle, mask=there & (angle < HALF), other=0.0)
    return first, second


@triton.jit
def _store_pairs(
    heads, first, second, there, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Store what `_load_pairs` returns."""
    if INTERLEAVED:
        dim = tl.arange(0, 2 * HALF_BLOCK)[None, :]
        pairs = tl.reshape(tl.join(first, second), [first.shape[0], 2 * HALF_BLOCK])
        tl.store(heads + dim, pairs, mask=there & (dim < 2 * HALF))
    else:
        angle = tl.arange(0, HALF_BLOCK)[None, :]
        tl.store(heads + angle, first, mask=there & (angle < HALF))
        tl.store(heads + HALF + angle, second, mask=there & (angle < HALF))


@triton.jit
def _rotate_heads(
    source,  # [HEADS, 1] pointers to the first elements of heads
    target,
    there,  # [HEADS, 1] bool
    weight,  # [1, 1] pointer to the weight of the norm, or [HEADS, 1]
    eps,
    cos,  # [1, HALF_BLOCK] fp32
    sin,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    LAYER_NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IN_PLACE: tl.constexpr,
):
    """Write heads to `target`, normalised if NORM, their first 2 * HALF elements rotated."""
    in_type: tl.constexpr = source.dtype.element_ty
    out_type: tl.constexpr = target.dtype.element_ty
    dim = 2 * HALF + tl.arange(0, max(REST_BLOCK, 1))[None, :]
    in_rest = there & (dim < HEAD_DIM)
    if HALF > 0:
        first, second = _load_pairs(source, there, HALF, HALF_BLOCK, INTERLEAVED)
        first, second = first.to(tl.float32), second.to(tl.float32)
    if REST_BLOCK > 0 and (NORM or not IN_PLACE):
        rest = tl.load(source + dim, mask=in_rest, other=0.0).to(tl.float32)
    if LAYER_NORM:
        total = tl.zeros([source.shape[0]], tl.float32)
        if HALF > 0:
            total += tl.sum(first, 1) + tl.sum(second, 1)
        if REST_BLOCK > 0:
            total += tl.sum(rest, 1)
        mean = (total / HEAD_DIM)[:, None]
        if HALF > 0:
            in_pairs = (tl.arange(0, HALF_BLOCK) < HALF)[None, :]
            first = tl.where(in_pairs, first - mean, 0.0)
            second = tl.where(in_pairs, second - mean, 0.0)
        if REST_BLOCK > 0:
            rest = tl.where(dim < HEAD_DIM, rest - mean, 0.0)
    if NORM:
        total = tl.zeros([source.shape[0]], tl.float32)
        if HALF > 0:
            total += tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST_BLOCK > 0:
            total += tl.sum(rest * rest, 1)
        inverse = (1.0 / tl.sqrt_rn(total / HEAD_DIM + eps))[:, None]
        has_weight = there if LAYER_NORM else tl.full([1, 1], 1, tl.int1)
        if HALF > 0:
            first_weight, second_weight = _load_pairs(weight, has_weight, HALF, HALF_BLOCK, INTERLEAVED)
            first = _scaled(first, inverse, first_weight, in_type, LAYER_NORM)
            second = _scaled(second, inverse, second_weight, in_type, LAYER_NORM)
        if REST_BLOCK > 0:
            rest_weight = tl.load(weight + dim, mask=has_weight & (dim < HEAD_DIM), other=0.0)
            rest = _scaled(rest, inverse, rest_weight, in_type, LAYER_NORM)
    if REST_BLOCK > 0 and (NORM or not IN_PLACE):
        tl.store(target + dim, rest.to(out_type), mask=in_rest)
    if HALF > 0:
        turned = (first * cos - second * sin).to(out_type)
        _store_pairs(
            target, turned, (second * cos + first * sin).to(out_type), there, HALF, HALF_BLOCK, INTERLEAVED
        )


# Positions and slots may be rows of one staging tensor, aligned or not.
@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr"])
def _rope_kv_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    angles_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    slot_mapping_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_scale_ptr,
    eps,
    k_inverse,
    v_inverse,
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
    NORM: tl.constexpr,
    LAYER_NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALE_Q: tl.constexpr,
    KV_KIND: tl.constexpr,
    STORED: tl.constexpr,
    NUM_SCALES: tl.constexpr,
):
    """One program per token and block of heads: first the blocks of q, then those of k with v."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    num_q_blocks = tl.cdiv(num_q_heads, HEADS)
    angle = tl.arange(0, HALF_BLOCK)
    table = angles_ptr + token * (2 * HALF) + angle
    cos = tl.load(table, mask=angle < HALF, other=0.0)[None, :]
    sin = tl.load(table + HALF, mask=angle < HALF, other=0.0)[None, :]
    if block < num_q_blocks:
        if SCALE_Q:  # all elements are rotated
            scale = tl.load(q_scale_ptr + token)
            cos, sin = cos * scale, sin * scale
        head = (block * HEADS + tl.arange(0, HEADS))[:, None]
        source = q_ptr + token * q_stride + head * HEAD_DIM
        weight = q_norm_ptr + (head * HEAD_DIM if LAYER_NORM else tl.zeros([1, 1], tl.int32))
        _rotate_heads(
            source, source, head < num_q_heads, weight, eps, cos, sin,
            HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, NORM, LAYER_NORM, INTERLEAVED, True,
        )  # fmt: skip
    else:
        slot = tl.load(slot_mapping_ptr + token)
        head = ((block - num_q_blocks) * HEADS + tl.arange(0, HEADS))[:, None]
        there = head < num_kv_heads
        place = slot * num_kv_heads + head
        k_head = k_ptr + token * k_stride + head * HEAD_DIM
        weight = k_norm_ptr + (head * HEAD_DIM if LAYER_NORM else tl.zeros([1, 1], tl.int32))
        # A scale is known when the whole head is: k is rotated where it lies and read again.
        IN_PLACE: tl.constexpr = KV_KIND != "float"
        _rotate_heads(
            k_head, k_head if IN_PLACE else k_cache_ptr + place * HEAD_DIM, there, weight, eps,
            cos, sin, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, NORM, LAYER_NORM, INTERLEAVED, IN_PLACE,
        )  # fmt: skip
        column = tl.arange(0, DIM_BLOCK)[None, :]
        in_head = there & (column < HEAD_DIM)
        v_head = v_ptr + token * v_stride + head * HEAD_DIM + column
        if KV_KIND == "float":
            tl.store(v_cache_ptr + place * HEAD_DIM + column, tl.load(v_head, mask=in_head), mask=in_head)
        else:
            tl.debug_barrier()  # what other threads of this program have rotated becomes visible
            k = tl.load(k_head + column, mask=in_head, other=0.0).to(tl.float32)
            v = tl.load(v_head, mask=in_head, other=0.0).to(tl.float32)
            store_heads(
                k, k_cache_ptr + place * STORED, k_scales_ptr + place * NUM_SCALES, there, k_inverse,
                KV_KIND, HEAD_DIM, DIM_BLOCK,
            )  # fmt: skip
            store_heads(
                v, v_cache_ptr + place * STORED, v_scales_ptr + place * NUM_SCALES, there, v_inverse,
                KV_KIND, HEAD_DIM, DIM_BLOCK,
            )  # fmt: skip


def rope_kv_write_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    angles: torch.Tensor | None,
    kv: KVLayer,
    slot_mapping: torch.Tensor,
    norm: QKNorm | None = None,
    interleaved: bool = False,
    q_scale: torch.Tensor | None = None,
) -> None:
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    half = 0 if angles is None else angles.shape[2]
    if angles is None and norm is None:
        num_q_heads = 0  # nothing changes them
    assert all(t.stride(2) == 1 and t.stride(1) == head_dim for t in (q, k, v))
    assert angles is None or angles.is_contiguous()
    if num_tokens == 0:
        return
    rest = head_dim - 2 * half
    assert q_scale is None or rest == 0
    _rope_kv_write_kernel[(num_tokens, triton.cdiv(num_q_heads, _HEADS) + triton.cdiv(num_kv_heads, _HEADS))](
        q,
        k,
        v,
        angles if angles is not None else q,
        *kv.pointers(),
        slot_mapping,
        *(norm or QKNorm(q, k, 0.0))[:2],
        q_scale if q_scale is not None else q,
        norm.eps if norm is not None else 0.0,
        1.0 / kv.key_scale,
        1.0 / kv.value_scale,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        num_q_heads,
        num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(max(half, 1)),
        REST_BLOCK=triton.next_power_of_2(rest) if rest else 0,
        DIM_BLOCK=triton.next_power_of_2(head_dim),
        HEADS=_HEADS,
        NORM=norm is not None,
        LAYER_NORM=norm is not None and norm.is_layer_norm,
        INTERLEAVED=interleaved,
        SCALE_Q=q_scale is not None,
        **kv.constants(),
        num_warps=2,
    )


def rope_kv_write_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    angles: torch.Tensor | None,
    kv: KVLayer,
    slot_mapping: torch.Tensor,
    norm: QKNorm | None = None,
    interleaved: bool = False,
    q_scale: torch.Tensor | None = None,
) -> None:
    """Rotate q in place, rotate k, and write k and v to their slots; k itself is left undefined.

    q [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]; all may be views of one
    fused projection (the heads of one token must be contiguous). angles [num_tokens, 2, rotary_dim / 2] fp32
    holds cos and sin of each token's position: the first rotary_dim <= head_dim elements of a head are
    rotated, element i together with i + rotary_dim / 2, or 2i with 2i + 1 if the pairs are `interleaved`;
    None: nothing is rotated. slot_mapping [num_tokens] int64 = page * page_size + offset. With `norm` the
    heads of q and k are normalised first; q_scale [num_tokens] fp32 multiplies those of q after the rotation,
    of all of their elements.
    """
    if norm is not None:
        for x, weight in ((q, norm.q_weight), (k, norm.k_weight)):
            if norm.is_layer_norm:
                x.copy_(torch.layer_norm(x.float(), x.shape[2:], None, None, norm.eps).mul_(weight))
            else:
                x.copy_(rms_norm_torch(x, weight, norm.eps))
    if angles is not None and q_scale is not None:
        _rotate(q, angles * q_scale[:, None, None], interleaved)
        _rotate(k, angles, interleaved)
    elif angles is not None and _are_side_by_side(q, k):
        heads = q.shape[1] + k.shape[1]
        _rotate(torch.as_strided(q, (q.shape[0], heads, q.shape[2]), q.stride()), angles, interleaved)
    elif angles is not None:
        _rotate(q, angles, interleaved)
        _rotate(k, angles, interleaved)
    write_heads(kv, slot_mapping, k, v)


def _are_side_by_side(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Return True if k's heads follow q's in memory, as in a fused projection: one rotation serves both."""
    return (
        q.stride() == k.stride()
        and q.stride(1) == q.shape[2]
        and k.data_ptr() == q.data_ptr() + q.shape[1] * q.shape[2] * q.element_size()
    )


def _rotate(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> None:
    """Rotate x [num_tokens, heads, head_dim] in place; angles [num_tokens, 2, rotary_dim / 2] fp32."""
    cos, sin = angles[:, :1], angles[:, 1:]  # [num_tokens, 1, rotary_dim / 2]
    half = angles.shape[2]
    if interleaved:
        first, second = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    # The products are fp32, so a 16-bit result is rounded once.
    turned = (first * cos).addcmul_(second, sin, value=-1)
    torch.add(second * cos, first * sin, out=second)
    first.copy_(turned)


rope_kv_write = dispatch(rope_kv_write_triton, rope_kv_write_torch, rope_kv_write_cpu)
