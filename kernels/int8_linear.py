"""y = (x Qᵀ) * scale (+ b), with a weight Q of int8 and one float32 scale per output feature."""

from typing import NamedTuple

import torch

from kernels.dispatch import dispatch, tl, triton

_TILE_BYTES = 2 << 20  # of float32 that the twin widens at a time


class TileShape(NamedTuple):
    """Tokens, features and inputs of a tile, and how the compiler schedules it."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def tile_shape(num_tokens: int, itemsize: int) -> TileShape:
    """Return the tile for a number of tokens and the bytes of an activation."""
    if itemsize == 4:  # exact fp32 products have no matrix unit; small tiles stay in registers
        return TileShape(16, 32, 64, 4, 2)
    # The fastest of 36, 12 and 20 on an H200 over the four products of an 8B layer. Beside cuBLAS in bfloat16
    # they take 0.7 to 0.9 times as long for 16 tokens, 1 to 1.5 times for 64, 1.4 times for 2048.
    if num_tokens <= 16:
        return TileShape(16, 32, 256, 4, 5)
    if num_tokens <= 64:
        return TileShape(64, 32, 128, 4, 4)
    return TileShape(256, 128, 64, 8, 3)


@triton.jit(do_not_specialize=["num_tokens"])
def _int8_linear_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    out_features,
    in_features,
    x_stride,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per tile of features and tokens, features first, so that neighbours share tokens.

    The tile is computed transposed: a matrix unit takes its left operand from registers, where the weights
    are once they are converted.
    """
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    # Past the end the last row again: what it computes is not stored.
    weight = (
        weight_ptr + tl.minimum(feature, out_features - 1).to(tl.int64)[:, None] * in_features + k[None, :]
    )
    x_row = x_ptr + tl.minimum(token, num_tokens - 1)[:, None] * x_stride + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in range(0, in_features, BLOCK_K):
        if EVEN_K:
            q = tl.load(weight + first)
            x = tl.load(x_row + first)
        else:
            inside = (k < in_features - first)[None, :]
            q = tl.load(weight + first, mask=inside, other=0)
            x = tl.load(x_row + first, mask=inside, other=0.0)
        acc = tl.dot(q.to(x.dtype), tl.trans(x), acc, input_precision="ieee")
    there = feature < out_features
    acc *= tl.load(scale_ptr + feature, mask=there, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + feature, mask=there, other=0.0).to(tl.float32)[:, None]
    target = out_ptr + token[:, None] * out_features + feature[None, :]
    result = tl.trans(acc).to(out_ptr.dtype.element_ty)
    tl.store(target, result, mask=(token < num_tokens)[:, None] & there[None, :])


def int8_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    shape: TileShape | None = None,
) -> torch.Tensor:
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    assert x.stride(1) == 1 and weight.is_contiguous()
    out = x.new_empty(num_tokens, out_features)
    if num_tokens == 0:
        return out
    shape = shape or tile_shape(num_tokens, x.element_size())
    grid = (triton.cdiv(out_features, shape.block_n), triton.cdiv(num_tokens, shape.block_m))
    _int8_linear_kernel[grid](
        x,
        weight,
        scale,
        bias if bias is not None else scale,
        out,
        num_tokens,
        out_features,
        in_features,
        x.stride(0),
        HAS_BIAS=bias is not None,
        EVEN_K=in_features % shape.block_k == 0,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    return out


def int8_linear_torch(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `(x @ weight.T) * scale + bias`, [num_tokens, out_features] in x's dtype.

    x [num_tokens, in_features], weight int8 [out_features, in_features], scale fp32 [out_features], bias
    [out_features] or None. Products are summed in fp32 and scaled after the sum. On a CPU it takes two to
    six times as long as a dense product of few rows, since the weight is widened each time (torch's own int8
    product is faster in bfloat16 but crashes at odd shapes).
    """
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    wide_x = x.float().t()
    out = x.new_empty(num_tokens, out_features)
    step = max(1, min(out_features, _TILE_BYTES // (4 * in_features)))
    tile = torch.empty(step, in_features, dtype=torch.float32, device=x.device)
    for start in range(0, out_features, step):
        part = slice(start, min(start + step, out_features))
        wide = tile[: part.stop - start].copy_(weight[part])
        product = torch.mm(wide, wide_x) * scale[part, None]
        if bias is not None:
            product += bias[part, None]
        out[:, part] = product.t()
    return out


int8_linear = dispatch(int8_linear_triton, int8_linear_torch)
