"""Weight-only int8: symmetric, one float32 scale per output feature, converted from unquantized weights.

Halves the memory of the layers. On a GPU steps of up to 16 tokens are faster than in 16 bits and larger
steps slower; kernels/eight_bit_linear.py has the times.
"""

import torch
from torch import Tensor

from kernels.eight_bit_linear import eight_bit_linear
from models.formats.base import MakeLinear, Shard
from models.formats.dense import with_dense_head
from models.formats.scaled_rows import ScaledRows


def conversion(dtype: torch.dtype, device: torch.device, shard: Shard) -> MakeLinear:
    """Return a maker of int8 linears; the output head stays dense."""
    return with_dense_head(Int8Weights, dtype, device, shard)


class Int8Weights(ScaledRows):
    """Rows of int8 and their scales."""

    values_dtype = torch.int8

    def _product(self, x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        return eight_bit_linear(x, values, scale, bias)
