"""Unquantized weights in the dtype the model computes in."""

import torch
from torch import Tensor

from kernels.expert_routing import ExpertGroups
from kernels.grouped_linear import GatedActivation, grouped_linear
from kernels.grouped_linear_sum import grouped_linear_sum
from kernels.linear import PackedWeight, linear, pack_weight
from models.formats.base import (
    EMBEDDING,
    OUTPUT_HEAD,
    LinearShape,
    LinearWeights,
    MakeLinear,
    MakeWeights,
    Shard,
    UnquantizedWeights,
)


def conversion(dtype: torch.dtype, device: torch.device, shard: Shard) -> MakeLinear:
    """Return a maker of dense linears."""
    return lambda _address, shape: DenseWeights(shape, dtype, device, shard)


def with_dense_head(
    make_weights: MakeWeights, dtype: torch.dtype, device: torch.device, shard: Shard
) -> MakeLinear:
    """Return a maker of linears of another format, but for embedding and output head, which stay dense.

    A tied head shares its table with the embedding, so a quantized copy would add memory, and errors of a
    head reach the logits directly.
    """

    def make_linear(address: str, shape: LinearShape) -> LinearWeights:
        make = DenseWeights if address in (EMBEDDING, OUTPUT_HEAD) else make_weights
        return make(shape, dtype, device, shard)

    return make_linear


class DenseWeights(UnquantizedWeights):
    """The rows in the model's dtype, packed for the device."""

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: torch.device, shard: Shard) -> None:
        super().__init__(shape, dtype, device, shard)
        self._filling: Tensor | None = None  # [out_features, in_features], until the last output is filled
        self._num_filled = 0
        self._packed: PackedWeight | None = None
        self._experts: Tensor | None = None  # [num_experts, out_features of one, in_features]

    def _fill_rows(self, first: int, rows: Tensor) -> None:
        if self._filling is None:
            size = (self.out_features, self.in_features)
            self._filling = torch.empty(size, dtype=self._dtype, device=self._device)
        self._filling[first : first + rows.shape[0]].copy_(rows[:, self._columns])
        self._num_filled += 1
        if self._num_filled == len(self._rows):
            if self.num_experts:
                self._experts = self._by_expert(self._filling)
            else:
                self._packed = pack_weight(self._filling)
            self._filling = None  # only the packed copy stays

    def share(self, table: Tensor) -> bool:
        (rows, _), *others = self._rows.values()
        assert not others, "several outputs cannot share one table"
        self._packed = pack_weight(table[rows, self._columns])
        return True

    def matmul(self, x: Tensor) -> Tensor:
        assert self._packed is not None, "multiplied before its weights were loaded"
        return linear(x, self._packed, self._bias)

    def grouped_matmul(
        self, x: Tensor, groups: ExpertGroups, activation: GatedActivation | None = None
    ) -> Tensor:
        assert self._experts is not None, "multiplied before its weights were loaded"
        bias = None if self._bias is None else self._by_expert(self._bias)
        return grouped_linear(x, self._experts, groups, bias=bias, activation=activation)

    def grouped_sum(
        self,
        x: Tensor,
        groups: ExpertGroups,
        weights: Tensor,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
    ) -> Tensor:
        assert self._experts is not None, "multiplied before its weights were loaded"
        bias = None if self._bias is None else self._by_expert(self._bias)
        return grouped_linear_sum(x, self._experts, groups, weights, shared, shared_gate, bias=bias)
