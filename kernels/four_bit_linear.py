"""y = x Wᵀ (+ b) with a weight of four bits and one scale per group of inputs (W4A16).

Up to 256 tokens the weight is the left operand, in registers. Up to 64, and up to 128 where features are few,
a group's sum is scaled: a decode step is bound by instructions, and this needs the fewest. For more the
weight is scaled and rounded to 16 bits. Inputs are divided among programs where features are few; the last
one of a tile to arrive adds the parts, in order, so that the sum does not depend on which that is. For more
than 256 tokens some rows of the weight at a time are written in 16 bits for cuBLAS.

Microseconds on an H200, bfloat16 activations, groups of 128, in a CUDA graph, beside cuBLAS in bfloat16:

    tokens                        64   128   256   512  1024  2048
    4096 -> 6144    four bits     18    29    43    53    84   148
                    cuBLAS        17    17    22    36    69   133
    4096 -> 4096    four bits     14    20    29    36    57    98
                    cuBLAS        12    15    17    24    45    88
    4096 -> 28672   four bits     48    73   141   232   384   682
                    cuBLAS        65    69    93   159   308   611
    14336 -> 4096   four bits     33    48    72   113   184   331
                    cuBLAS        37    38    49    79   150   298
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import dispatch, tl, triton
from kernels.four_bit_weight import TILE_INPUTS, TILE_ROWS, FourBitWeight, constants, dequantize, tile_sums
from kernels.split_sums import MANY_FEATURES, split_inputs, sum_of_splits

_MANY_INPUTS = 8192  # from here on more parts of the inputs are worth their sums
_MANY_TOKENS = 257  # from here on writing the weight in 16 bits costs less than unpacking it for each tile
# Of 16-bit weights that are written at a time; 16 to 64 MiB are up to 1.7 times slower.
_CHUNK_BYTES = 128 << 20
_TILE_BYTES = 2 << 20  # of float32 that the twin widens at a time


class LaunchShape(NamedTuple):
    """Tokens and features of a tile, what is scaled, the parts of the inputs, and warps."""

    block_m: int
    block_n: int
    scale_sums: bool
    num_splits: int
    num_warps: int
    num_stages: int


def launch_shape(num_tokens: int, out_features: int, in_features: int, itemsize: int) -> LaunchShape:
    """Return the launch for numbers of tokens, features and inputs and the bytes of an activation."""
    if itemsize == 4:  # exact fp32 products use no matrix unit; small accumulators stay in registers
        return LaunchShape(16, 32, True, 1, 4, 2)
    many = out_features >= MANY_FEATURES
    if num_tokens <= 8:
        return LaunchShape(8, 32, True, 2 if many else 8, 2, 3)
    if num_tokens <= 16:
        return LaunchShape(16, 64 if many else 32, True, 2 if many else 4 if out_features > 4096 else 8, 2, 3)
    if num_tokens <= 32:
        return LaunchShape(32, 64, True, 2 if many else 4, 4, 3)
    if num_tokens <= 64:
        if many:
            return LaunchShape(64, 128, True, 1, 8, 3)
        if in_features >= _MANY_INPUTS:
            return LaunchShape(64, 128, True, 8, 4, 3)
        return LaunchShape(64 if out_features > 4096 else 32, 64, True, 4, 4, 3)
    tiles = -(-num_tokens // 128) * -(-out_features // 128)
    if num_tokens <= 128 and not many:
        return LaunchShape(128, 128, True, max(1, min(4, 128 // tiles)), 8, 3)
    return LaunchShape(128, 128, False, max(1, min(4, 256 // tiles)), 4, 3)


@triton.jit(do_not_specialize=["num_tokens", "split_tiles"])
def _four_bit_linear_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_tokens,
    out_features,
    in_features,
    x_stride,
    num_rows,
    split_tiles,
    GROUP_SIZE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    USE_PTX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
    EVEN_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per tile of features and tokens, features first, and part of the inputs."""
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    first = split * split_tiles
    end = tl.minimum(first + split_tiles, tl.cdiv(in_features, 128))
    # Past the end the last feature again: its results are not stored.
    row = tl.minimum(feature, out_features - 1)
    is_token = token < num_tokens
    x_row = x_ptr + token.to(tl.int64) * x_stride
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc = tile_sums(
        acc, x_row, is_token, values_ptr, scales_ptr, zeros_ptr, row, first, end, in_features, num_rows,
        GROUP_SIZE, HAS_ZEROS, IS_FLOAT, True, SCALE_SUMS, EVEN_K, USE_PTX,
    )  # fmt: skip
    acc, is_last = sum_of_splits(acc, partial_ptr, arrived_ptr, NUM_SPLITS)
    if is_last:
        target = out_ptr + token.to(tl.int64)[None, :] * out_features + feature[:, None]
        stored = is_token[None, :] & (feature < out_features)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias_ptr + row).to(tl.float32)[:, None]
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=stored)


def four_bit_linear_triton(
    x: Tensor, weight: FourBitWeight, bias: Tensor | None = None, *, shape: LaunchShape | None = None
) -> Tensor:
    num_tokens, in_features = x.shape
    out_features = weight.out_features
    assert x.stride(1) == 1 and weight.values.is_contiguous() and weight.scales.is_contiguous()
    if num_tokens >= _MANY_TOKENS and shape is None and x.element_size() == 2:
        return _by_chunks(x, weight, bias)
    out = x.new_empty(num_tokens, out_features)
    if num_tokens == 0:
        return out
    shape = shape or launch_shape(num_tokens, out_features, in_features, x.element_size())
    grid = (triton.cdiv(out_features, shape.block_n), triton.cdiv(num_tokens, shape.block_m))
    num_tiles = triton.cdiv(in_features, TILE_INPUTS)
    tile_size = shape.block_n * shape.block_m
    splits = split_inputs(shape.num_splits, num_tiles, grid[0] * grid[1], tile_size, torch.float32, x.device)
    _four_bit_linear_kernel[(*grid, splits.num_splits)](
        x,
        weight.values,
        weight.scales,
        weight.zeros if weight.zeros is not None else weight.scales,
        bias if bias is not None else x,
        out,
        splits.partial,
        splits.arrived,
        num_tokens,
        out_features,
        in_features,
        x.stride(0),
        weight.scales.stride(0),
        splits.num_blocks,
        **constants(weight, x),
        HAS_BIAS=bias is not None,
        SCALE_SUMS=shape.scale_sums,
        EVEN_K=in_features % TILE_INPUTS == 0,
        NUM_SPLITS=splits.num_splits,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    return out


def _by_chunks(x: Tensor, weight: FourBitWeight, bias: Tensor | None) -> Tensor:
    """Return the product with some rows of the weight at a time, written in x's dtype."""
    out = x.new_empty(x.shape[0], weight.out_features)
    step = max(1, _CHUNK_BYTES // (x.element_size() * weight.in_features * TILE_ROWS))
    for first in range(0, weight.values.shape[0], step):
        chunk = weight.row_tiles(first, min(first + step, weight.values.shape[0]))
        part = slice(first * TILE_ROWS, first * TILE_ROWS + chunk.out_features)
        wide = dequantize(chunk, x.dtype).t()
        if bias is None:
            torch.mm(x, wide, out=out[:, part])
        else:
            torch.addmm(bias[part], x, wide, out=out[:, part])
    return out


def four_bit_linear_torch(x: Tensor, weight: FourBitWeight, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, [num_tokens, out_features] in x's dtype.

    x [num_tokens, in_features]; bias [out_features] or None. The weight is widened to float32 some rows at a
    time, and sums are float32.
    """
    wide_x = x.float().t()
    out = x.new_empty(x.shape[0], weight.out_features)
    step = max(1, _TILE_BYTES // (4 * weight.in_features * TILE_ROWS))
    for first in range(0, weight.values.shape[0], step):
        chunk = weight.row_tiles(first, min(first + step, weight.values.shape[0]))
        part = slice(first * TILE_ROWS, first * TILE_ROWS + chunk.out_features)
        product = torch.mm(dequantize(chunk, torch.float32), wide_x)
        if bias is not None:
            product += bias[part, None]
        out[:, part] = product.t()
    return out


four_bit_linear = dispatch(four_bit_linear_triton, four_bit_linear_torch)
