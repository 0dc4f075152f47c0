"""y = (x Qᵀ) * scale (+ b), with a weight Q of int8 or fp8 (e4m3) and one float32 scale per output feature.

Microseconds on an H200, activations in bfloat16, tiles the fastest of about 40, beside cuBLAS with a bfloat16
weight:

    tokens                              1    16    64   256  2048
    4096 -> 28672     int8_linear      39    41    89   156  1166
                      cuBLAS           57    58    63   105   716
    14336 -> 4096     int8_linear      27    27    62   112   573
                      cuBLAS           32    33    37    55   344
"""

from typing import NamedTuple

import torch

from kernels.dispatch import dispatch, tl, triton
from kernels.fp8_values import copy_widened, loadable, widened

_NUM_PROGRAMS = 128  # about one per multiprocessor; with fewer, smaller tiles are faster
_TILE_BYTES = 2 << 20  # of float32 that the twin widens at a time


class TileShape(NamedTuple):
    """Tokens, features and inputs of a tile, and how the compiler schedules it."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def tile_shape(num_tokens: int, out_features: int, itemsize: int) -> TileShape:
    """Return the tile for a number of tokens and of features and the bytes of an activation."""
    if itemsize == 4:  # exact fp32 products use no matrix unit; small accumulators stay in registers
        return TileShape(16, 32, 64, 4, 2)
    if num_tokens <= 16:
        return TileShape(16, 32, 256, 4, 5)
    if num_tokens <= 64:
        return TileShape(64, 32, 128, 4, 4)
    large, small = TileShape(256, 128, 64, 8, 3), TileShape(128, 64, 128, 8, 3)
    num_programs = -(-out_features // large.block_n) * -(-num_tokens // large.block_m)
    return large if num_programs >= _NUM_PROGRAMS else small


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

    The weights are the right operand of the product, which passes through shared memory after the conversion.
    As the left one they could stay in registers, 12 to 18 % faster for many tokens, but Triton 3.6 then
    overwrites them before the asynchronous product has read them: errors of 4 % at (256, 128, 64, 8, 3).
    """
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    there = feature < out_features
    # Past the end the last feature again: its results are not stored.
    row = tl.minimum(feature, out_features - 1).to(tl.int64)
    weight = weight_ptr + row[:, None] * in_features + k[None, :]
    is_token = (token < num_tokens)[:, None]
    x_row = x_ptr + token[:, None] * x_stride + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, in_features, BLOCK_K):
        if EVEN_K:
            q = tl.load(weight + first)
            x = tl.load(x_row + first, mask=is_token, other=0.0)
        else:
            inside = (k < in_features - first)[None, :]
            q = tl.load(weight + first, mask=inside, other=0.0)
            x = tl.load(x_row + first, mask=is_token & inside, other=0.0)
        acc = tl.dot(x, tl.trans(widened(q, x.dtype)), acc, input_precision="ieee")
    acc *= tl.load(scale_ptr + feature, mask=there, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + feature, mask=there, other=0.0).to(tl.float32)[None, :]
    target = out_ptr + token[:, None] * out_features + feature[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=is_token & there[None, :])


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
    shape = shape or tile_shape(num_tokens, out_features, x.element_size())
    grid = (triton.cdiv(out_features, shape.block_n), triton.cdiv(num_tokens, shape.block_m))
    _int8_linear_kernel[grid](
        x,
        loadable(weight),
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

    x [num_tokens, in_features], weight int8 or fp8 [out_features, in_features], scale fp32 [out_features],
    bias [out_features] or None. Products are summed in fp32 and scaled after the sum. On a CPU it takes two
    to six times as long as a dense product of few rows, since the weight is widened each time (torch's own
    int8 product is faster in bfloat16 but crashes at odd shapes).
    """
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    wide_x = x.float().t()
    out = x.new_empty(num_tokens, out_features)
    step = max(1, min(out_features, _TILE_BYTES // (4 * in_features)))
    tile = torch.empty(step, in_features, dtype=torch.float32, device=x.device)
    for start in range(0, out_features, step):
        part = slice(start, min(start + step, out_features))
        wide = copy_widened(tile[: part.stop - start], weight[part])
        product = torch.mm(wide, wide_x) * scale[part, None]
        if bias is not None:
            product += bias[part, None]
        out[:, part] = product.t()
    return out


int8_linear = dispatch(int8_linear_triton, int8_linear_torch)
