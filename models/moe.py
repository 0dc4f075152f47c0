"""Mixtures of experts: blocks of which each token uses a few (Shazeer et al., 2017)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.expert_routing import ExpertGroups, group_by_expert
from kernels.grouped_linear import GatedActivation
from kernels.router import route
from models.formats.base import LinearShape
from models.forward_batch import ForwardBatch
from models.layers import Leaf, LinearLeaf, Mlp, Part, UngatedMlp
from models.spec import MlpSpec, MoeSpec


class Router(Leaf):
    """Chooses the experts of each token by logits in fp32, which no weight format rounds.

    The gate of the shared expert, [1, hidden_size], is one more row of the same product.
    """

    def __init__(self, spec: MoeSpec, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._options = spec.router
        self._num_experts = spec.num_experts
        self._dtype = dtype
        self._parameters: dict[str, tuple[int, ...]] = {"weight": (spec.num_experts, hidden_size)}
        if spec.shared_gate:
            self._parameters["shared_gate"] = (1, hidden_size)
        if spec.router_bias:
            self._parameters["bias"] = (spec.num_experts,)
        if spec.correction_bias:
            self._parameters["correction_bias"] = (spec.num_experts,)
        self._shape = (spec.num_experts + spec.shared_gate, hidden_size)
        self._device = device
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._correction_bias: Tensor | None = None

    def parameters(self) -> dict[str, tuple[int, ...]]:
        return self._parameters

    def fill(self, name: str, tensor: Tensor) -> None:
        if name == "bias":
            self._bias = torch.zeros(self._shape[0], dtype=self._dtype, device=self._device)
            self._bias[: self._num_experts].copy_(tensor)
        elif name == "correction_bias":
            self._correction_bias = tensor.to(self._device, torch.float32, copy=True)
        else:
            if self._weight is None:
                self._weight = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            rows = slice(None, self._num_experts) if name == "weight" else slice(self._num_experts, None)
            self._weight[rows].copy_(tensor)

    def random(self, name: str, generator: torch.Generator) -> Tensor:
        shape, device = self._parameters[name], generator.device
        values = torch.randn(shape, dtype=self._dtype, device=device, generator=generator)
        return values.mul_(shape[-1] ** -0.5)

    def __call__(self, hidden: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (expert ids int32, weights fp32) [num_tokens, top_k], and the shared expert's gate, if any.

        hidden [num_tokens, hidden_size]; the gate is fp32 [num_tokens, 1], before its sigmoid.
        """
        assert self._weight is not None, "called before its weights were loaded"
        ids, weights, gate = route(
            hidden, self._weight, self._num_experts, self._options, self._bias, self._correction_bias
        )
        return ids, weights, gate if gate.shape[1] else None


class ExpertLinear(LinearLeaf):
    """A linear map for each expert."""

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(shape)
        assert shape.num_experts

    def __call__(
        self, x: Tensor, groups: ExpertGroups, activation: GatedActivation, batch: ForwardBatch
    ) -> Tensor:
        """Return act(gate) * up of each pair of a token and an expert, [num_pairs, out_features / 2].

        x [num_tokens, in_features], the tokens of `batch`.
        """
        return self.weights.grouped_matmul(x, groups, activation)

    def weighted_sum(
        self,
        x: Tensor,
        groups: ExpertGroups,
        weights: Tensor,
        batch: ForwardBatch,
        shared: Tensor | None,
        shared_gate: Tensor | None,
    ) -> Tensor:
        """Return the weighted sum of each token's experts, [num_tokens, out_features].

        x [num_pairs, in_features], weights fp32 [num_tokens, top_k]; shared [num_tokens, out_features] is
        added, times the sigmoid of shared_gate [num_tokens, 1].
        """
        return self.weights.grouped_sum(x, groups, weights, shared, shared_gate)


class Moe(Part):
    """A router, experts, and an expert that all tokens use if the spec has one."""

    def __init__(self, spec: MoeSpec, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.router = Router(spec, hidden_size, dtype, device)
        halves = {"gate": spec.intermediate_size, "up": spec.intermediate_size}
        self.gate_up = ExpertLinear(LinearShape(hidden_size, halves, spec.bias, "column", spec.num_experts))
        self.down = ExpertLinear(
            LinearShape(spec.intermediate_size, {"": hidden_size}, spec.bias, "row", spec.num_experts)
        )
        self.shared = Mlp(spec.shared, hidden_size) if spec.shared is not None else None
        self._activation = spec.activation
        self._num_experts = spec.num_experts

    def __call__(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the block's output, [num_tokens, hidden_size], for hidden of that shape."""
        expert_ids, weights, gate = self.router(hidden, batch)
        groups = group_by_expert(expert_ids, self._num_experts)
        x = self.gate_up(hidden, groups, self._activation, batch)
        shared = None if self.shared is None else self.shared(hidden, batch)
        return self.down.weighted_sum(x, groups, weights, batch, shared, gate)


@dataclass(frozen=True)
class MlpMaker:
    """Makes a model's feed-forward blocks."""

    hidden_size: int
    dtype: torch.dtype
    device: torch.device

    def __call__(self, spec: MlpSpec | MoeSpec) -> Mlp | UngatedMlp | Moe:
        """Return the block that a spec describes."""
        if isinstance(spec, MoeSpec):
            return Moe(spec, self.hidden_size, self.dtype, self.device)
        return (Mlp if spec.gated else UngatedMlp)(spec, self.hidden_size)
