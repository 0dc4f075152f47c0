"""Weight-only int8: symmetric, one float32 scale per output feature, converted from unquantized weights.

Halves the memory of the layers. On a GPU steps of up to 16 tokens are faster than in 16 bits and larger
steps slower; kernels/int8_linear.py has the times. The output head stays dense: a tied one shares its table
with the embedding, so an int8 copy would add memory, and errors of a head reach the logits directly.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kernels.int8_linear import int8_linear
from models.formats.base import LinearShape, MakeLinear, Shard
from models.formats.dense import DenseWeights, UnquantizedWeights

CONVERTS = True

_DENSE = "output"
_LARGEST = 127


def linear_maker(
    _options: Mapping[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard
) -> MakeLinear:
    """Return a maker of int8 linears; the output head stays dense."""
    return lambda address, shape: (DenseWeights if address == _DENSE else Int8Weights)(
        shape, dtype, device, shard
    )


class Int8Weights(UnquantizedWeights):
    """Rows of int8 and their scales. Ranks that divide a row use the scale of the whole row."""

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: torch.device, shard: Shard) -> None:
        super().__init__(shape, dtype, device, shard)
        self._weight: Tensor | None = None  # int8 [out_features, in_features]
        self._scale: Tensor | None = None  # fp32 [out_features]

    def _fill_rows(self, first: int, rows: Tensor) -> None:
        if self._weight is None or self._scale is None:
            size = (self.out_features, self.in_features)
            self._weight = torch.empty(size, dtype=torch.int8, device=self._device)
            self._scale = torch.empty(self.out_features, dtype=torch.float32, device=self._device)
        values, scale = quantize(rows.to(self._device))
        self._weight[first : first + len(rows)].copy_(values[:, self._columns])
        self._scale[first : first + len(rows)].copy_(scale)

    def matmul(self, x: Tensor) -> Tensor:
        assert self._weight is not None and self._scale is not None, "multiplied before it was filled"
        return int8_linear(x, self._weight, self._scale, self._bias)


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [n, k] of floats as int8 [n, k] and their scales fp32 [n]: values * scale is near rows."""
    rows = rows.float()
    scale = rows.abs().amax(1).div_(_LARGEST)
    # A row of zeros has the scale 0, and any divisor makes its values 0.
    values = rows / torch.where(scale > 0, scale, 1.0)[:, None]
    return values.round_().to(torch.int8), scale
