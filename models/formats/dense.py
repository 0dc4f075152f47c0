"""Unquantized weights in the dtype the model computes in."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kernels.linear import PackedWeight, linear, pack_weight
from models.formats.base import LinearShape, LinearWeights, MakeLinear, Shard

CONVERTS = True


def linear_maker(
    _options: Mapping[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard
) -> MakeLinear:
    """Return a maker of dense linears."""
    return lambda _address, shape: DenseWeights(shape, dtype, device, shard)


class UnquantizedWeights(LinearWeights):
    """Weights that are loaded from unquantized tensors, in whatever form they are kept.

    The rank's rows of all outputs are stacked in one matrix, so that one product computes them all.
    """

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: torch.device, shard: Shard) -> None:
        self._dtype = dtype
        self._device = device
        self._columns = slice(0, shape.in_features)
        if shape.shard == "row":
            self._columns = shard.slice(shape.in_features)
        self._parameters: dict[str, tuple[int, ...]] = {}
        self._rows: dict[str, tuple[slice, int]] = {}  # rows taken of each output, and where they go
        self.out_features = 0
        for name, features in shape.outputs.items():
            prefix = f"{name}." if name else ""
            self._parameters[f"{prefix}weight"] = (features, shape.in_features)
            if shape.bias:
                self._parameters[f"{prefix}bias"] = (features,)
            rows = shard.slice(features) if shape.shard == "column" else slice(0, features)
            self._rows[name] = rows, self.out_features
            self.out_features += rows.stop - rows.start
        self.in_features = self._columns.stop - self._columns.start
        self._adds_bias = shape.bias and not (shape.shard == "row" and shard.rank > 0)
        self._bias: Tensor | None = None

    def parameters(self) -> dict[str, tuple[int, ...]]:
        return self._parameters

    def fill(self, parameter: str, tensor: Tensor) -> None:
        name, _, kind = parameter.rpartition(".")
        rows, first = self._rows[name]
        if kind == "weight":
            self._fill_rows(first, tensor[rows])
        elif self._adds_bias:
            if self._bias is None:
                self._bias = torch.empty(self.out_features, dtype=self._dtype, device=self._device)
            self._bias[first : first + rows.stop - rows.start].copy_(tensor[rows])

    @abstractmethod
    def _fill_rows(self, first: int, rows: Tensor) -> None:
        """Store rows [num_rows, in_features of the whole model] from row `first` on."""

    def random(self, parameter: str, generator: torch.Generator) -> Tensor:
        shape = self._parameters[parameter]
        values = torch.randn(shape, dtype=self._dtype, device=generator.device, generator=generator)
        return values.mul_(shape[-1] ** -0.5)


class DenseWeights(UnquantizedWeights):
    """The rows in the model's dtype, packed for the device."""

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: torch.device, shard: Shard) -> None:
        super().__init__(shape, dtype, device, shard)
        self._filling: Tensor | None = None  # [out_features, in_features], until the last output is filled
        self._num_filled = 0
        self._packed: PackedWeight | None = None

    def _fill_rows(self, first: int, rows: Tensor) -> None:
        if self._filling is None:
            size = (self.out_features, self.in_features)
            self._filling = torch.empty(size, dtype=self._dtype, device=self._device)
        self._filling[first : first + rows.shape[0]].copy_(rows[:, self._columns])
        self._num_filled += 1
        if self._num_filled == len(self._rows):
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
