"""y = quantize(x) Wᵀ * weight_scale (+ b): activations are quantized to the dtype of the weight.

One token is multiplied without the matrix unit, and each program of its product quantizes it. Microseconds on
an H200 in bfloat16 with both kernels of several tokens, beside cuBLAS with a bfloat16 weight:

    tokens                        1     16     64    256   2048
    4096 -> 6144     fp8        9.8   12.4   13.4   17.1   78.0
                     int8       9.5   12.3   13.4   19.3   87.4
                     bfloat16  17.0   15.9   16.4   21.7    132
    4096 -> 28672    fp8       34.4   37.3   39.6   53.1    322
                     int8      34.0   33.9   36.7   69.7    482
                     bfloat16  56.4   59.1   63.0   92.3    608
    14336 -> 4096    fp8       18.1   22.5   25.2   42.4    183
                     int8      19.4   22.9   25.6   50.3    192
                     bfloat16  31.5   32.4   35.8   48.0    293
"""

from torch import Tensor

from kernels.dispatch import dispatch
from kernels.matvec import matvec
from kernels.quantize_rows import quantize_rows_torch, quantize_rows_triton
from kernels.scaled_linear import scaled_linear_torch, scaled_linear_triton


def quantized_linear_triton(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
) -> Tensor:
    if len(x) == 1:
        return matvec(x, weight, weight_scale, bias, quantize=True, x_scale=x_scale)
    values, scales = quantize_rows_triton(x, weight.dtype, x_scale)
    return scaled_linear_triton(values, scales, weight, weight_scale, bias, x.dtype)


def quantized_linear_torch(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
) -> Tensor:
    """Return `scaled_linear` of what `quantize_rows` makes of x, [num_tokens, out_features] in x's dtype.

    x [num_tokens, in_features]; weight torch.float8_e4m3fn or torch.int8 [out_features, in_features];
    weight_scale fp32 [out_features]; bias [out_features] or None. x_scale fp32 [1]: of all tokens; None: each
    token has its own.
    """
    values, scales = quantize_rows_torch(x, weight.dtype, x_scale)
    return scaled_linear_torch(values, scales, weight, weight_scale, bias, x.dtype)


quantized_linear = dispatch(quantized_linear_triton, quantized_linear_torch)
