"""Base of formats whose checkpoints store each weight in several tensors, such as codes and scales."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kernels.expert_routing import ExpertGroups
from kernels.grouped_linear import GatedActivation
from models.errors import ModelError
from models.formats.base import LinearShape, LinearWeights, UnquantizedWeights


class StoredParts(LinearWeights):
    """Weights whose outputs are stored in several tensors each, kept as the weights of another format.

    An output is converted when all of its tensors have come. A format says which tensors there are, and how
    they become weights of the format that keeps and multiplies them: `DenseWeights`, if nothing else can.
    """

    def __init__(self, modules: Sequence[str], shape: LinearShape, kept: UnquantizedWeights) -> None:
        """Take the checkpoint's names of the linear, for messages, and the weights that are to be filled."""
        self.modules = modules
        self._in_features = shape.in_features  # of the whole model
        self._kept = kept
        self._parts: dict[str, dict[str, Tensor]] = {}  # of outputs that have not all of their tensors yet

    @abstractmethod
    def _stored(self, out_features: int) -> dict[str, tuple[int, ...]]:
        """Return the tensors of one output: name, such as `qweight`, -> shape. Raises ModelError.

        The names do not depend on out_features, which may be 0.
        """

    @abstractmethod
    def _convert(self, name: str, parts: Mapping[str, Tensor]) -> None:
        """Fill the output `name` of the kept weights from its tensors. Raises ModelError for wrong values.

        Tensors on the device `meta` have no values to check.
        """

    def _check_dtype(self, parameter: str, kind: str, dtype: torch.dtype) -> None:
        """Raise ModelError if the tensor `kind` of an output, such as `scales`, has a wrong dtype."""

    def _fill_floats(self, name: str, rows: Tensor) -> None:
        """Fill the output `name` of the kept weights from floats [out_features, in_features]."""
        self._kept.fill(f"{name}.weight".lstrip("."), rows)

    def _error(self, message: str) -> ModelError:
        return ModelError(f"{', '.join(self.modules)}: {message}")

    def parameters(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in self._kept.parameters().items():
            prefix = name.removesuffix("weight")
            if prefix == name:
                found[name] = shape
            else:
                found |= {f"{prefix}{kind}": stored for kind, stored in self._stored(shape[0]).items()}
        return found

    def fill(self, parameter: str, tensor: Tensor) -> None:
        name, _, kind = parameter.rpartition(".")
        if kind == "bias":
            self._kept.fill(parameter, tensor)
            return
        self._check_dtype(parameter, kind, tensor.dtype)
        parts = self._parts.setdefault(name, {})
        parts[kind] = tensor
        if parts.keys() == self._stored(0).keys():
            del self._parts[name]
            self._convert(name, parts)

    def random(self, parameter: str, generator: torch.Generator) -> Tensor:
        """Return a random bias; a format returns the tensors that it stores."""
        return self._kept.random(parameter, generator)

    def matmul(self, x: Tensor) -> Tensor:
        return self._kept.matmul(x)

    def grouped_matmul(
        self, x: Tensor, groups: ExpertGroups, activation: GatedActivation | None = None
    ) -> Tensor:
        return self._kept.grouped_matmul(x, groups, activation)

    def grouped_sum(
        self,
        x: Tensor,
        groups: ExpertGroups,
        weights: Tensor,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
    ) -> Tensor:
        return self._kept.grouped_sum(x, groups, weights, shared, shared_gate)
