"""One tile of attention inside a kernel: a block of queries against a block of keys read through pages."""

from typing import Any

import torch

from kernels.attention_batch import AttentionOptions
from kernels.dispatch import tl, triton
from kernels.kv_layer import KVLayer
from kernels.kv_values import load_halves, load_heads

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)
# Finite, so that a row whose keys so far were all hidden has a difference of 0, not NaN, in its exponent.
# The sums of such a row are erased by its first visible key, whose rescaling factor is exactly 0.
_HIDDEN = tl.constexpr(-1.0e30)


def constants(q: torch.Tensor, kv: KVLayer, options: AttentionOptions) -> dict[str, Any]:
    """Return the constants of the kernels made of tiles, and check the strides they rely on.

    q [num_tokens, num_heads, head_dim]; heads of one token and the pages must be contiguous.
    """
    page_size, num_kv_heads = kv.keys.shape[1:3]
    head_dim = q.shape[2]
    assert q.stride(2) == 1 and q.stride(1) == head_dim
    assert options.scale > 0
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": q.shape[1] // num_kv_heads,
        "HEAD_DIM": head_dim,
        "DIM_BLOCK": max(32, triton.next_power_of_2(head_dim)),  # a matrix unit takes 16 of a half
        "PAGE_SIZE": page_size,
        "WINDOW": options.window,
        "SOFTCAP": options.softcap > 0,
        "SINKS": options.sinks is not None,
        **kv.constants(),
    }


@triton.jit
def _slots(start, end, pages_ptr, PAGE_SIZE: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the keys of a tile, [BLOCK_N] int32, and their slots, int64."""
    key = start + tl.arange(0, BLOCK_N)
    read = key
    if MASKED:
        # Past the end read the last key again: memory there may hold NaN, which a weight of 0 does not
        # remove, and a load without a mask is cheaper.
        read = tl.minimum(key, end - 1)
    page = tl.load(pages_ptr + read // PAGE_SIZE)
    return key, page.to(tl.int64) * PAGE_SIZE + read % PAGE_SIZE


@triton.jit
def _weigh(
    scores, total, peak, key, position, end, factor, softcap,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Return the weights of keys, what the sums so far are multiplied by, total and peak: an online softmax.

    (Milakov and Gimelshein, 2018; Dao, 2023.) scores has the keys along AXIS.
    """
    if SOFTCAP:
        # tanh(x) = 2 * sigmoid(2 * x) - 1
        scores = softcap * (2.0 * tl.sigmoid(scores * (2.0 / softcap)) - 1.0)
    if MASKED:
        key = tl.expand_dims(key, 1 - AXIS)
        query = tl.expand_dims(position, AXIS)
        visible = (key < end) & (key <= query)
        if WINDOW > 0:
            visible &= key > query - WINDOW
        # Scale before subtracting the maximum: fused into one multiply-add, a hidden score would leave the
        # rounding error of the maximum, 1e22 in the exponent of a row without a visible key so far.
        exponents = tl.where(visible, scores * factor, _HIDDEN)
        new_peak = tl.maximum(peak, tl.max(exponents, AXIS))
        weights = tl.exp2(exponents - tl.expand_dims(new_peak, AXIS))
    else:
        new_peak = tl.maximum(peak, tl.max(scores, AXIS) * factor)
        weights = tl.exp2(scores * factor - tl.expand_dims(new_peak, AXIS))
    rescale = tl.exp2(peak - new_peak)
    return weights, tl.expand_dims(rescale, AXIS), total * rescale + tl.sum(weights, AXIS), new_peak


@triton.jit
def attend_tile(
    acc,  # [M, DIM_BLOCK] fp32: values weighted so far
    total,  # [M] fp32: sum of the weights so far
    peak,  # [M] fp32: largest score so far, times factor
    q,  # [M, DIM_BLOCK]
    position,  # [M] int32: of each query
    start,  # first key of the tile
    end,  # keys from here on are not read
    pages_ptr,  # page table of the row
    k_ptr,  # k_cache at this KV head
    v_ptr,
    k_scales_ptr,  # their scales, at this KV head
    v_scales_ptr,
    factor,  # scale * log2(e): turns q·k into an exponent of 2
    softcap,  # softcap / scale, in the units of q·k
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV_KIND: tl.constexpr,
    STORED: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return (acc, total, peak) including the tile's keys: one step of the online softmax.

    Without MASKED every key of the tile is visible to every query.
    """
    key, slot = _slots(start, end, pages_ptr, PAGE_SIZE, MASKED, BLOCK_N)
    k = load_heads(
        k_ptr, k_scales_ptr, slot, q.dtype, NUM_KV_HEADS, HEAD_DIM, DIM_BLOCK, KV_KIND, STORED, NUM_SCALES
    )
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    weights, rescale, total, peak = _weigh(
        scores, total, peak, key, position, end, factor, softcap, WINDOW, SOFTCAP, MASKED, 1
    )
    v = load_heads(
        v_ptr, v_scales_ptr, slot, q.dtype, NUM_KV_HEADS, HEAD_DIM, DIM_BLOCK, KV_KIND, STORED, NUM_SCALES
    )
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale, input_precision="ieee")
    return acc, total, peak


@triton.jit
def attend_few(
    low_acc,  # [DIM_BLOCK / 2, M] fp32: of the halves of `load_halves`
    high_acc,
    total,
    peak,
    low_q,  # [DIM_BLOCK / 2, M]
    high_q,
    position,
    start,
    end,
    pages_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    factor,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV_KIND: tl.constexpr,
    STORED: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    USE_PTX: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return what `attend_tile` returns, for few queries: keys and values are the left operands.

    The matrix unit has at least 16 rows but 8 columns, so that 4 or 8 heads of a group take half the
    registers and instructions.
    """
    key, slot = _slots(start, end, pages_ptr, PAGE_SIZE, MASKED, BLOCK_N)
    low, high = load_halves(
        k_ptr, k_scales_ptr, slot, low_q.dtype, NUM_KV_HEADS, HEAD_DIM, DIM_BLOCK, KV_KIND, STORED,
        NUM_SCALES, USE_PTX, False,
    )  # fmt: skip
    scores = tl.dot(low, low_q, input_precision="ieee")
    scores = tl.dot(high, high_q, scores, input_precision="ieee")
    weights, rescale, total, peak = _weigh(
        scores, total, peak, key, position, end, factor, softcap, WINDOW, SOFTCAP, MASKED, 0
    )
    low, high = load_halves(
        v_ptr, v_scales_ptr, slot, low_q.dtype, NUM_KV_HEADS, HEAD_DIM, DIM_BLOCK, KV_KIND, STORED,
        NUM_SCALES, USE_PTX, True,
    )  # fmt: skip
    weights = weights.to(low.dtype)
    low_acc = tl.dot(low, weights, low_acc * rescale, input_precision="ieee")
    high_acc = tl.dot(high, weights, high_acc * rescale, input_precision="ieee")
    return low_acc, high_acc, total, peak
