"""Unquantized weights in the dtype the model computes in."""

import torch
from torch import Tensor

from kernels.linear import PackedWeight, linear, pack_weight
from models.formats.base import LinearShape, LinearWeights


class DenseWeights(LinearWeights):
    """Fused outputs lie one below the other in one matrix, so that one product computes them all."""

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._rows: dict[str, tuple[int, int]] = {}
        first = 0
        for name, features in shape.outputs.items():
            self._rows[name] = (first, features)
            first += features
        self._filling: Tensor | None = None  # [out_features, in_features], until the last output has come
        self._missing = set(shape.outputs)
        self._bias: Tensor | None = None
        self._packed: PackedWeight | None = None

    def parameters(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for name, features in self._shape.outputs.items():
            prefix = f"{name}." if name else ""
            found[f"{prefix}weight"] = (features, self._shape.in_features)
            if self._shape.bias:
                found[f"{prefix}bias"] = (features,)
        return found

    def fill(self, parameter: str, tensor: Tensor) -> None:
        name, _, kind = parameter.rpartition(".")
        first, features = self._rows[name]
        if kind == "bias":
            if self._bias is None:
                self._bias = torch.empty(self._shape.out_features, dtype=self._dtype, device=self._device)
            self._bias.narrow(0, first, features).copy_(tensor)
            return
        if self._filling is None:
            size = (self._shape.out_features, self._shape.in_features)
            self._filling = torch.empty(size, dtype=self._dtype, device=self._device)
        self._filling.narrow(0, first, features).copy_(tensor)
        self._missing.remove(name)
        if not self._missing:
            self.share(self._filling)
            self._filling = None  # a packed copy is all that stays

    def share(self, weight: Tensor) -> None:
        """Multiply by `weight` [out_features, in_features], which somebody else (an embedding) holds too."""
        self._packed = pack_weight(weight)

    def matmul(self, x: Tensor) -> Tensor:
        assert self._packed is not None, "multiplied before its weights were loaded"
        return linear(x, self._packed, self._bias)
