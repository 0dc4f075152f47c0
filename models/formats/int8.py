"""Weight-only int8: symmetric, one float32 scale per output feature, converted from unquantized weights.

On a GPU steps of up to 16 tokens are faster than in 16 bits and larger steps slower;
kernels/eight_bit_linear.py has the times. Beside activations in float32, which are those of a CPU, embedding
and output head are int8, too: of a small model they are a fifth of all weights.
"""

import torch
from torch import Tensor

from kernels.eight_bit_linear import eight_bit_linear, eight_bit_linear_rounded
from kernels.embedding_rows import embedding_rows
from models.formats.base import LinearShape, MakeLinear, Shard
from models.formats.dense import with_dense_head
from models.formats.scaled_rows import ScaledRows


def conversion(dtype: torch.dtype, device: torch.device, shard: Shard) -> MakeLinear:
    """Return a maker of int8 linears; embedding and output head stay dense, but not beside float32."""
    if dtype == torch.float32:
        return lambda _address, shape: ConvertedInt8Weights(shape, dtype, device, shard)
    return with_dense_head(ConvertedInt8Weights, dtype, device, shard)


class Int8Weights(ScaledRows):
    """Rows of int8 and their scales, as a checkpoint may store them."""

    values_dtype = torch.int8

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: torch.device, shard: Shard) -> None:
        super().__init__(shape, dtype, device, shard)
        is_whole = shard.world == 1 or shape.shard is None
        self.embeds = is_whole and not shape.bias and not shape.num_experts

    def embed(self, indices: Tensor) -> Tensor:
        assert self._values is not None and self._scale is not None, "read before it was filled"
        return embedding_rows(self._scale, self._values, indices).to(self._dtype)

    def _product(self, x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        return eight_bit_linear(x, values, scale, bias)


class ConvertedInt8Weights(Int8Weights):
    """Rows of int8 that unquantized weights were rounded to. Activations may be rounded, too, more finely."""

    def _product(self, x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        return eight_bit_linear_rounded(x, values, scale, bias)
