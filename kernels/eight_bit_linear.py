"""y = (x Qᵀ) * scale (+ b), with Q of int8 or fp8 (e4m3) and one float32 scale per output feature (W8A16).

One token is multiplied without the matrix unit. For many tokens some rows of the weight at a time are written
in 16 bits for cuBLAS, which costs less than converting the weight for each tile of tokens.

Microseconds on an H200, activations in bfloat16, tiles the fastest of about 40, beside cuBLAS with a bfloat16
weight:

    tokens                              1    16    64   128   256  2048
    4096 -> 6144      int8              11    13    21    27    44   164
                      cuBLAS           17    16    16    17    22   132
    4096 -> 28672     int8              36    38    65   129   157   856
                      cuBLAS           56    59    63    69    92   608
    14336 -> 4096     int8              20    26    35    48    96   344
                      cuBLAS           32    32    36    37    48   293
"""

import torch
from torch import Tensor

from kernels.cpu.dot_products import num_lanes
from kernels.cpu.eight_bit_linear import eight_bit_linear as eight_bit_linear_cpu
from kernels.dispatch import dispatch, tl, triton
from kernels.fp8_values import loadable, widened, widened_rows
from kernels.matvec import matvec
from kernels.scaled_linear import LaunchShape, launch
from kernels.split_sums import MANY_FEATURES

_MANY_TOKENS = 256  # from here on the weight is written in 16 bits; with many features from 512 on
_CHUNK_BYTES = 128 << 20  # of 16-bit weights that are written at a time


def launch_shape(num_tokens: int, out_features: int, itemsize: int) -> LaunchShape:
    """Return the launch for a number of tokens and of features and the bytes of an activation.

    As the right operand the weight passes through shared memory after the conversion. As the left one it
    stays in registers, which Triton 3.6 overwrites too early in tiles of 256 tokens (errors of 4 %).
    """
    if itemsize == 4:  # exact fp32 products use no matrix unit; small accumulators stay in registers
        return LaunchShape(16, 32, 64, False, 1, 4, 2)
    if num_tokens <= 16:
        return LaunchShape(16, 32, 256, False, 1, 4, 5)
    many = out_features >= MANY_FEATURES
    if num_tokens <= 64:
        return LaunchShape(64, 128, 128, True, 1, 8, 3) if many else LaunchShape(64, 64, 128, True, 4, 4, 4)
    return LaunchShape(128, 64, 128, False, 1, 8, 3) if many else LaunchShape(128, 64, 64, True, 4, 4, 4)


@triton.jit
def _dequantize_kernel(weight_ptr, scale_ptr, out_ptr, in_features, BLOCK: tl.constexpr):
    """One program per row and block of inputs."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < in_features
    w = widened(tl.load(weight_ptr + row * in_features + k, mask=inside, other=0.0), tl.float32)
    w *= tl.load(scale_ptr + row)
    tl.store(out_ptr + row * in_features + k, w.to(out_ptr.dtype.element_ty), mask=inside)


def eight_bit_linear_triton(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, shape: LaunchShape | None = None
) -> Tensor:
    if shape is None and len(x) == 1:
        return matvec(x, weight, scale, bias, quantize=False)
    is_many = len(x) >= _MANY_TOKENS * (2 if len(weight) >= MANY_FEATURES else 1)
    if shape is None and is_many and x.element_size() == 2:
        return _by_chunks(x, weight, scale, bias)
    shape = shape or launch_shape(len(x), len(weight), x.element_size())
    return launch(x, None, weight, scale, bias, x.dtype, shape)


def _by_chunks(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product with some rows of the weight at a time, written in x's dtype."""
    out_features, in_features = weight.shape
    out = x.new_empty(len(x), out_features)
    step = max(1, min(out_features, _CHUNK_BYTES // (x.element_size() * in_features)))
    dense = x.new_empty(step, in_features)
    for first in range(0, out_features, step):
        part = slice(first, min(first + step, out_features))
        rows = dense[: part.stop - first]
        grid = (len(rows), triton.cdiv(in_features, 4096))
        _dequantize_kernel[grid](loadable(weight[part]), scale[part], rows, in_features, BLOCK=4096)
        out[:, part] = torch.nn.functional.linear(x, rows, None if bias is None else bias[part])
    return out


def eight_bit_linear_torch(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `(x @ weight.T) * scale + bias`, [num_tokens, out_features] in x's dtype.

    x [num_tokens, in_features], weight int8 or fp8 [out_features, in_features], scale fp32 [out_features],
    bias [out_features] or None. Products are summed in fp32 and scaled after the sum. Without the compiled
    kernel it takes two to six times as long on a CPU as a dense product of few rows, since the weight is
    widened each time (torch's own int8 product is faster in bfloat16 but crashes at odd shapes).
    """
    wide_x = x.float().t()
    out = x.new_empty(len(x), len(weight))
    for part, wide in widened_rows(weight):
        product = torch.mm(wide, wide_x) * scale[part, None]
        if bias is not None:
            product += bias[part, None]
        out[:, part] = product.t()
    return out


def _rounded_cpu(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product with activations rounded to 14 bits, or what the twin does without a kernel."""
    if weight.dtype != torch.int8 or not num_lanes():
        return eight_bit_linear_torch(x, weight, scale, bias)
    if x.dtype == torch.float32:  # a conversion to itself takes 0.7 µs
        return eight_bit_linear_cpu(x, weight, scale, bias)
    return eight_bit_linear_cpu(x.float(), weight, scale, None if bias is None else bias.float()).to(x.dtype)


# On a CPU beside bfloat16, whose rounding of activations is coarser, the compiled product; float32 is exact.
eight_bit_linear = dispatch(eight_bit_linear_triton, eight_bit_linear_torch, _rounded_cpu, (torch.bfloat16,))
# The same with float32 activations that are rounded on a CPU, too: for weights that were rounded.
eight_bit_linear_rounded = dispatch(
    eight_bit_linear_triton, eight_bit_linear_torch, _rounded_cpu, (torch.bfloat16, torch.float32)
)
