"""y = W x for one token and a weight of eight bits: each weight is read once, without the matrix unit.

The quantization of x is part of it: a kernel of its own would take 1.8 us and more on an H200, where the
product of 4096 inputs and 6144 features takes 9.4.
"""

from typing import NamedTuple

from torch import Tensor

from kernels.dispatch import tl, triton
from kernels.fp8_values import loadable, widened
from kernels.quantize_rows import LIMITS, quantized, scale_of


class MatvecShape(NamedTuple):
    """Features and inputs of a tile, and how the compiler schedules it."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def matvec_shape(in_features: int) -> MatvecShape:
    """Return the tile, the fastest of 50 on an H200."""
    return MatvecShape(8, 1024, 4, 3) if in_features > 8192 else MatvecShape(8, 512, 2, 3)


@triton.jit
def _matvec_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    out_features,
    in_features,
    LIMIT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per tile of features. LIMIT is 0 if x is not quantized."""
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the end the last feature again: its results are not stored.
    row = tl.minimum(feature, out_features - 1)
    k = tl.arange(0, BLOCK_K)
    weight = weight_ptr + row.to(tl.int64)[:, None] * in_features + k[None, :]
    SUM: tl.constexpr = tl.int32 if LIMIT == 127 else tl.float32
    x_scale = 1.0
    if LIMIT:
        place = tl.arange(0, BLOCK_ROW)
        whole = tl.load(x_ptr + place, mask=place < in_features, other=0.0).to(tl.float32)
        x_scale, inverse = scale_of(whole, 0, x_scale_ptr, HAS_SCALE, LIMIT)
    acc = tl.zeros([BLOCK_N, BLOCK_K], SUM)
    for start in tl.range(0, in_features, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            w = tl.load(weight + start)
            x = tl.load(x_ptr + start + k)
        else:
            inside = k < in_features - start
            w = tl.load(weight + start, mask=inside[None, :], other=0.0)
            x = tl.load(x_ptr + start + k, mask=inside, other=0.0)
        x = x.to(tl.float32)
        if LIMIT:
            x = quantized(x, inverse, weight_ptr.dtype.element_ty, LIMIT)
        acc += widened(w, SUM) * x.to(SUM)[None, :]
    y = tl.sum(acc, 1).to(tl.float32) * tl.load(weight_scale_ptr + row) * x_scale
    if HAS_BIAS:
        y += tl.load(bias_ptr + row).to(tl.float32)
    tl.store(out_ptr + feature, y.to(out_ptr.dtype.element_ty), mask=feature < out_features)


def matvec(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    quantize: bool,
    x_scale: Tensor | None = None,
) -> Tensor:
    """Return `(x @ weight.T) * weight_scale + bias`, [1, out_features] in x's dtype, by the kernel.

    x [1, in_features], weight int8 or fp8 [out_features, in_features]. With `quantize` x is rounded to the
    dtype of the weight first, as `quantize_rows` does it.
    """
    out_features, in_features = weight.shape
    shape = matvec_shape(in_features)
    out = x.new_empty(1, out_features)
    _matvec_kernel[(triton.cdiv(out_features, shape.block_n),)](
        x,
        x_scale if x_scale is not None else weight_scale,
        weight if quantize else loadable(weight),
        weight_scale,
        bias if bias is not None else weight_scale,
        out,
        out_features,
        in_features,
        LIMIT=LIMITS[weight.dtype] if quantize else 0,
        HAS_SCALE=x_scale is not None,
        HAS_BIAS=bias is not None,
        EVEN_K=in_features % shape.block_k == 0,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        BLOCK_ROW=triton.next_power_of_2(in_features),
        STAGES=shape.num_stages,
        num_warps=shape.num_warps,
    )
    return out
