"""Base of formats that keep one scale per output feature, converted from unquantized weights."""

from abc import abstractmethod

import torch
from torch import Tensor

from kernels.eight_bit_linear import eight_bit_linear
from kernels.expert_routing import ExpertGroups
from kernels.fp8_values import FP8, has_fp8
from kernels.grouped_linear import GatedActivation, grouped_linear
from kernels.grouped_linear_sum import grouped_linear_sum
from kernels.quantize_rows import quantize_rows
from kernels.quantized_linear import quantized_linear
from models.formats.base import LinearShape, Shard, UnquantizedWeights

_PART_VALUES = 1 << 22  # of a weight that are quantized at a time: 16 MiB in float32


class ScaledRows(UnquantizedWeights):
    """Rows of narrow values, and one float32 scale for each. A format says the values' dtype and its product.

    Ranks that divide a row use the scale of the whole row.
    """

    values_dtype: torch.dtype

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: torch.device, shard: Shard) -> None:
        super().__init__(shape, dtype, device, shard)
        self._values: Tensor | None = None  # values_dtype [out_features, in_features]
        self._scale: Tensor | None = None  # fp32 [out_features]

    @abstractmethod
    def _product(self, x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """Return `(x @ values.T) * scale + bias`, [num_tokens, out_features] in x's dtype."""

    def _scale_shape(self) -> tuple[int, ...]:
        """Return the shape of the scales of all rows."""
        return (self.out_features,)

    def _allocate(self) -> tuple[Tensor, Tensor]:
        """Return the values and the scales of all rows, which the first call makes."""
        if self._values is None or self._scale is None:
            size = (self.out_features, self.in_features)
            self._values = torch.empty(size, dtype=self.values_dtype, device=self._device)
            self._scale = torch.empty(self._scale_shape(), dtype=torch.float32, device=self._device)
        return self._values, self._scale

    def _fill_rows(self, first: int, rows: Tensor) -> None:
        kept_values, kept_scale = self._allocate()
        if rows.is_meta:  # where arithmetic imports torch._dynamo and sympy: a second, and 70 MB
            return
        for part in torch.split(rows.to(self._device), max(1, _PART_VALUES // rows.shape[1])):
            values, scale = quantize_rows(part.contiguous(), self.values_dtype)
            kept_values[first : first + len(part)].copy_(values[:, self._columns])
            kept_scale[first : first + len(part)].copy_(scale)
            first += len(part)

    def fill_values(self, name: str, values: Tensor, scale: Tensor) -> None:
        """Load the output `name`: values [n, in_features] and their scales [n], of the whole model."""
        rows, first = self._rows[name]
        mine = slice(first, first + rows.stop - rows.start)
        kept_values, kept_scale = self._allocate()
        kept_values[mine].copy_(values[rows, self._columns])
        kept_scale[mine].copy_(scale[rows])

    def matmul(self, x: Tensor) -> Tensor:
        assert self._values is not None and self._scale is not None, "multiplied before it was filled"
        return self._product(x, self._values, self._scale, self._bias)

    def grouped_matmul(
        self, x: Tensor, groups: ExpertGroups, activation: GatedActivation | None = None
    ) -> Tensor:
        assert self._values is not None and self._scale is not None, "multiplied before it was filled"
        values, scale = self._by_expert(self._values), self._by_expert(self._scale)
        bias = None if self._bias is None else self._by_expert(self._bias)
        return grouped_linear(x, values, groups, scale=scale, bias=bias, activation=activation)

    def grouped_sum(
        self,
        x: Tensor,
        groups: ExpertGroups,
        weights: Tensor,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
    ) -> Tensor:
        assert self._values is not None and self._scale is not None, "multiplied before it was filled"
        values, scale = self._by_expert(self._values), self._by_expert(self._scale)
        bias = None if self._bias is None else self._by_expert(self._bias)
        return grouped_linear_sum(x, values, groups, weights, shared, shared_gate, scale=scale, bias=bias)


def fp8_fallback(device: torch.device) -> str | None:
    """Return a message for a device on which `quantized_product` leaves x as it is for fp8, else None."""
    return None if has_fp8(device) else f"{device} has no products of fp8, so that only weights are fp8"


def quantized_product(
    x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None, input_scale: Tensor | None = None
) -> Tensor:
    """Return `(x @ values.T) * scale + bias` with x quantized to the dtype of the values, in x's dtype.

    input_scale fp32 [1]: of all tokens; None: each token has its own. A GPU without products of fp8 leaves x
    as it is.
    """
    if values.dtype == FP8 and not has_fp8(x.device):
        return eight_bit_linear(x, values, scale, bias)
    return quantized_linear(x, values, scale, bias, input_scale)
