"""Conversion between keys and values as they are computed and as they are stored: fp8, int8 or int4.

int8 has one scale for a head of a token, int4 a scale and a minimum for each group of 32 values of it, with
value 2i in the lower half of byte i and 2i + 1 in the upper. Scales are rounded to float16 first and values
divided by what is stored. kernels/kv_layer.py describes the tensors.
"""

import torch

from kernels.dispatch import tl, triton
from kernels.four_bit_weight import unpack
from kernels.fp8_values import FP8_MAX
from kernels.kv_layer import GROUP, KVLayer, num_groups

_FP8_MAX = tl.constexpr(FP8_MAX)
_GROUP = tl.constexpr(GROUP)


@triton.jit
def store_heads(
    x,  # [HEADS, DIM_BLOCK] fp32, zero past HEAD_DIM
    stored,  # [HEADS, 1] pointers to the heads in the cache
    scales,  # [HEADS, 1] pointers to their scales
    there,  # [HEADS, 1] bool: the others are not written
    inverse,  # 1 / scale of the layer, in fp8
    KV_KIND: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Store heads of keys or values."""
    HEADS: tl.constexpr = x.shape[0]
    if KV_KIND == "fp8":
        dim = tl.arange(0, DIM_BLOCK)[None, :]
        x = tl.clamp(x * inverse, -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        tl.store(stored + dim, x.to(stored.dtype.element_ty), mask=there & (dim < HEAD_DIM))
    elif KV_KIND == "int8":
        dim = tl.arange(0, DIM_BLOCK)[None, :]
        scale = (tl.max(tl.abs(x), 1, keep_dims=True) * (1.0 / 127.0)).to(tl.float16)
        tl.store(scales, scale, mask=there)
        divisor = scale.to(tl.float32)
        n = tl.floor(x / tl.where(divisor > 0, divisor, 1.0) + 0.5)
        n = tl.minimum(tl.maximum(n, -127.0), 127.0)
        tl.store(stored + dim, n.to(tl.int8), mask=there & (dim < HEAD_DIM))
    else:
        SIZE: tl.constexpr = min(_GROUP, DIM_BLOCK)
        NUM_GROUPS: tl.constexpr = (HEAD_DIM + _GROUP - 1) // _GROUP
        x = tl.reshape(x, [HEADS, DIM_BLOCK // SIZE, SIZE])
        least = tl.min(x, 2)
        scale = ((tl.max(x, 2) - least) * (1.0 / 15.0)).to(tl.float16)
        least = least.to(tl.float16)
        group = tl.arange(0, DIM_BLOCK // SIZE)[None, :]
        in_head = there & (group < NUM_GROUPS)
        tl.store(scales + group, scale, mask=in_head)
        tl.store(scales + NUM_GROUPS + group, least, mask=in_head)
        divisor = scale.to(tl.float32)[:, :, None]
        n = tl.floor((x - least.to(tl.float32)[:, :, None]) / tl.where(divisor > 0, divisor, 1.0) + 0.5)
        n = tl.minimum(tl.maximum(n, 0.0), 15.0).to(tl.int32)
        low, high = tl.split(tl.reshape(n, [HEADS, DIM_BLOCK // 2, 2]))
        half = tl.arange(0, DIM_BLOCK // 2)[None, :]
        tl.store(stored + half, (low | (high << 4)).to(tl.uint8), mask=there & (half < HEAD_DIM // 2))


# PTX of two pairs of bytes to the first and to the second number of both pairs. Bytes of int8, their signs
# inverted, are the last bits of 1024 + 128 + n.
_FP8_PAIRS = tl.constexpr(
    "{ .reg .b32 a; .reg .b16 b, c; prmt.b32 a, $2, 0, 0x3120; mov.b32 {b, c}, a; "
    "cvt.rn.f16x2.e4m3x2 $0, b; cvt.rn.f16x2.e4m3x2 $1, c; }"
)
_INT8_PAIRS = tl.constexpr(
    "{ .reg .b32 a, b; xor.b32 a, $2, 0x80808080; mov.b32 b, 0x64806480; "
    "prmt.b32 $0, a, 0x64646464, 0x4240; prmt.b32 $1, a, 0x64646464, 0x4341; "
    "sub.f16x2 $0, $0, b; sub.f16x2 $1, $1, b; }"
)


@triton.jit
def load_heads(
    stored,  # pointer to the KV head of slot 0
    scales,  # pointer to its scales
    slot,  # [N] int64
    TYPE: tl.constexpr,  # of the result
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    KV_KIND: tl.constexpr,
    STORED: tl.constexpr,
    NUM_SCALES: tl.constexpr,
):
    """Return the keys or values of one KV head in `slot`, [N, DIM_BLOCK]; the layer's scale is left out.

    Past HEAD_DIM they are finite.
    """
    N: tl.constexpr = slot.shape[0]
    if KV_KIND == "int4":
        SIZE: tl.constexpr = min(_GROUP, DIM_BLOCK)
        NUM_GROUPS: tl.constexpr = (HEAD_DIM + _GROUP - 1) // _GROUP
        half = tl.arange(0, DIM_BLOCK // 2)[None, :]
        offset = slot[:, None] * (NUM_KV_HEADS * STORED) + half
        if DIM_BLOCK == HEAD_DIM:
            packed = tl.load(stored + offset)
        else:
            packed = tl.load(stored + offset, mask=half < STORED, other=0)
        group = tl.arange(0, DIM_BLOCK // SIZE)[None, :]
        at = scales + slot[:, None] * (NUM_KV_HEADS * NUM_SCALES) + group
        scale = tl.load(at, mask=group < NUM_GROUPS, other=0.0).to(tl.float32)
        least = tl.load(at + NUM_GROUPS, mask=group < NUM_GROUPS, other=0.0).to(tl.float32)
        n = tl.reshape(tl.join(packed & 15, packed >> 4), [N, DIM_BLOCK // SIZE, SIZE])
        x = n.to(tl.float32) * scale[:, :, None] + least[:, :, None]
        return tl.reshape(x, [N, DIM_BLOCK]).to(TYPE)
    dim = tl.arange(0, DIM_BLOCK)
    offset = slot[:, None] * (NUM_KV_HEADS * HEAD_DIM) + dim[None, :]
    if DIM_BLOCK == HEAD_DIM:
        x = tl.load(stored + offset)
    else:
        x = tl.load(stored + offset, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    if KV_KIND == "int8":
        scale = tl.load(scales + slot * (NUM_KV_HEADS * NUM_SCALES)).to(tl.float32)
        x = x.to(tl.float32) * scale[:, None]
    return x.to(TYPE)


@triton.jit
def half_elements(half: tl.constexpr, KV_KIND: tl.constexpr, DIM_BLOCK: tl.constexpr):
    """Return the elements of a head, [DIM_BLOCK / 2], that a half has: quantized, every other one."""
    column = tl.arange(0, DIM_BLOCK // 2)
    return half * (DIM_BLOCK // 2) + column if KV_KIND == "float" else 2 * column + half


@triton.jit
def load_halves(
    stored,
    scales,
    slot,
    TYPE: tl.constexpr,  # float16 with USE_PTX
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    KV_KIND: tl.constexpr,
    STORED: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    USE_PTX: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Return what `load_heads` returns as two halves, [N, DIM_BLOCK / 2] each, or [DIM_BLOCK / 2, N].

    `half_elements` says which elements they have. With USE_PTX two bytes are one load of 16 bits: the matrix
    unit takes values of two keys at a time, and there is an instruction that transposes numbers of 16 bits,
    none for bytes.
    """
    N: tl.constexpr = slot.shape[0]
    HALF: tl.constexpr = DIM_BLOCK // 2
    AXIS: tl.constexpr = 0 if TRANSPOSED else 1  # of the elements
    column = tl.expand_dims(tl.arange(0, HALF), 1 - AXIS)
    place = tl.expand_dims(slot, AXIS)
    if KV_KIND == "float":
        head = stored + place * (NUM_KV_HEADS * HEAD_DIM) + column
        if DIM_BLOCK == HEAD_DIM:
            low = tl.load(head)
            high = tl.load(head + HALF)
        else:
            low = tl.load(head, mask=column < HEAD_DIM, other=0.0)
            high = tl.load(head + HALF, mask=column + HALF < HEAD_DIM, other=0.0)
    elif not USE_PTX:
        x = load_heads(
            stored, scales, slot, TYPE, NUM_KV_HEADS, HEAD_DIM, DIM_BLOCK, KV_KIND, STORED, NUM_SCALES
        )
        low, high = tl.split(tl.reshape(x, [N, HALF, 2]))
        if TRANSPOSED:
            low = tl.trans(low)
            high = tl.trans(high)
    elif KV_KIND == "int4":
        SIZE: tl.constexpr = min(_GROUP // 2, HALF)  # bytes of a group
        GROUPS: tl.constexpr = HALF // SIZE
        NUM_GROUPS: tl.constexpr = (HEAD_DIM + _GROUP - 1) // _GROUP
        head = stored + place * (NUM_KV_HEADS * STORED) + column
        in_head = column < STORED
        packed = tl.load(head) if DIM_BLOCK == HEAD_DIM else tl.load(head, mask=in_head, other=0)
        group = tl.expand_dims(tl.arange(0, GROUPS), 1 - AXIS)
        at = scales + place * (NUM_KV_HEADS * NUM_SCALES) + group
        scale = tl.load(at, mask=group < NUM_GROUPS, other=0.0)
        least = tl.load(at + NUM_GROUPS, mask=group < NUM_GROUPS, other=0.0)
        scale = tl.expand_dims(scale, AXIS + 1)
        least = tl.expand_dims(least, AXIS + 1)
        low, high = unpack(packed, tl.float16, False, True)
        groups: tl.constexpr = [GROUPS, SIZE, N] if TRANSPOSED else [N, GROUPS, SIZE]
        low = tl.reshape(tl.reshape(low - 1024, groups) * scale + least, packed.shape)
        high = tl.reshape(tl.reshape(high - 1024, groups) * scale + least, packed.shape)
    else:
        head = stored.to(tl.pointer_type(tl.int16)) + place * (NUM_KV_HEADS * HEAD_DIM // 2) + column
        in_head = column < HEAD_DIM // 2
        packed = tl.load(head) if DIM_BLOCK == HEAD_DIM else tl.load(head, mask=in_head, other=0)
        PTX: tl.constexpr = _FP8_PAIRS if KV_KIND == "fp8" else _INT8_PAIRS
        low, high = tl.inline_asm_elementwise(
            PTX, "=r,=r,r", [packed], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
        if KV_KIND == "int8":
            scale = tl.expand_dims(tl.load(scales + slot * (NUM_KV_HEADS * NUM_SCALES)), AXIS)
            low *= scale
            high *= scale
    return low, high


def write_heads(kv: KVLayer, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store k and v, [num_tokens, num_kv_heads, head_dim] each, in `slots`, int64 [num_tokens]."""
    for x, stored, scales, layer_scale in (
        (k, kv.keys, kv.key_scales, kv.key_scale),
        (v, kv.values, kv.value_scales, kv.value_scale),
    ):
        if kv.kind == "fp8":
            x = (x.float() * (1.0 / layer_scale)).clamp_(-FP8_MAX, FP8_MAX).to(stored.dtype)
            x, stored = x.view(torch.uint8), stored.view(torch.uint8)
        elif kv.kind != "float":
            x, of_heads = quantize(x, kv.kind)
            assert scales is not None
            rows = scales.view(-1, *scales.shape[2:])[:, :, : of_heads.shape[2]]
            rows.index_copy_(0, slots, of_heads)
        stored.view(-1, *stored.shape[2:]).index_copy_(0, slots, x.to(stored.dtype))


def quantize(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements and the float16 scales of heads x [num_tokens, num_kv_heads, head_dim].

    int8 [..., head_dim] and [..., 1], or for int4 bytes [..., head_dim / 2] and [..., 2 * num_groups].
    """
    x = x.float()
    if kind == "int8":
        scale = (x.abs().amax(-1, keepdim=True) * (1.0 / 127.0)).half()
        divisor = scale.float()
        n = torch.floor(x / torch.where(divisor > 0, divisor, 1.0) + 0.5).clamp_(-127, 127)
        return n.to(torch.int8), scale
    head_dim = x.shape[-1]
    # A short last group counts as filled with zeros.
    x = torch.nn.functional.pad(x, (0, num_groups(head_dim) * GROUP - head_dim)).unflatten(-1, (-1, GROUP))
    least = x.amin(-1, keepdim=True)
    scale = ((x.amax(-1, keepdim=True) - least) * (1.0 / 15.0)).half()
    least, divisor = least.half(), scale.float()
    n = torch.floor((x - least.float()) / torch.where(divisor > 0, divisor, 1.0) + 0.5).clamp_(0, 15)
    n = n.to(torch.uint8).flatten(-2)[..., :head_dim]
    return n[..., ::2] | (n[..., 1::2] << 4), torch.cat((scale, least), -2).squeeze(-1)


def read_heads(
    stored: torch.Tensor, scales: torch.Tensor | None, index: torch.Tensor, head_dim: int
) -> torch.Tensor:
    """Return keys or values fp32 [n, head_dim]; the scale of an fp8 layer is left out.

    index [n]: of a head among all of `stored`, slot * num_kv_heads + head.
    """
    rows = stored.view(-1, stored.shape[3])
    if stored.dtype == torch.float8_e4m3fn:
        return rows.view(torch.uint8).index_select(0, index).view(stored.dtype).float()
    rows = rows.index_select(0, index)
    if scales is None:
        return rows.float()
    of_heads = scales.view(-1, scales.shape[3]).index_select(0, index).float()
    if stored.dtype == torch.int8:
        return rows.float() * of_heads[:, :1]
    groups = num_groups(head_dim)
    scale, least = of_heads[:, : 2 * groups].unflatten(1, (2, groups)).unbind(1)
    n = torch.stack((rows & 15, rows >> 4), -1).flatten(1).float()
    n = torch.nn.functional.pad(n, (0, groups * GROUP - head_dim)).unflatten(1, (groups, GROUP))
    return (n * scale.unsqueeze(2) + least.unsqueeze(2)).flatten(1)[:, :head_dim]
