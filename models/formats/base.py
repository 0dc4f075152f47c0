"""Interfaces between a Linear and its weight format, and loading from unquantized tensors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kernels.expert_routing import ExpertGroups
from kernels.expert_sum import expert_sum
from kernels.grouped_linear import GatedActivation


@dataclass(frozen=True)
class Shard:
    """Part `rank` of `world`: what one of several devices holds of a model."""

    rank: int = 0
    world: int = 1

    def slice(self, size: int) -> slice:
        """Return this rank's share of `size` items; shares differ by one at most."""
        return slice(size * self.rank // self.world, size * (self.rank + 1) // self.world)


WHOLE = Shard()


@dataclass(frozen=True)
class LinearShape:
    """A linear map of `in_features` to one or several fused outputs, name -> features, in order.

    A single output has the name "". Each output is one tensor of the checkpoint. All sizes are those of the
    whole model. `shard` says what ranks divide: the features of each output ("column": a rank computes a part
    of each output), in_features ("row": the ranks' results are summed), or nothing (None).

    With num_experts above 0 there are as many such maps, one for each expert; each token meets those of its
    own experts. Expert 3 has its tensors below `3.`, such as `3.gate.weight`.
    """

    in_features: int
    outputs: Mapping[str, int]
    bias: bool = False
    shard: Literal["column", "row"] | None = None
    num_experts: int = 0

    @property
    def out_features(self) -> int:
        """Features of all outputs together, of one expert if there are several."""
        return sum(self.outputs.values())

    @property
    def num_parameters(self) -> int:
        """Weights and biases, of all experts together."""
        return max(1, self.num_experts) * self.out_features * (self.in_features + self.bias)

    @property
    def all_outputs(self) -> dict[str, int]:
        """The outputs; with experts those of each in turn, under names such as `3.gate`."""
        if not self.num_experts:
            return dict(self.outputs)
        return {
            f"{expert}.{name}".rstrip("."): features
            for expert in range(self.num_experts)
            for name, features in self.outputs.items()
        }


class LinearWeights(ABC):
    """The weights of one Linear in one format, of one rank: filled once, packed, then only multiplied.

    Its parameters are the checkpoint's whole tensors; slicing them for the rank is part of filling.
    """

    fallback: str | None = None
    """How weights are kept or multiplied where it is not as their format says, for the log; else None."""

    embeds: bool = False
    """True if `embed` looks up rows, so that an embedding with these weights keeps no table of its own."""

    @abstractmethod
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors to load from the checkpoint: name, such as `q.weight`, -> shape."""

    @abstractmethod
    def fill(self, parameter: str, tensor: Tensor) -> None:
        """Load one parameter from a tensor on any device."""

    @abstractmethod
    def random(self, parameter: str, generator: torch.Generator) -> Tensor:
        """Return a random tensor for a parameter, on the generator's device, that keeps x's variance."""

    @abstractmethod
    def matmul(self, x: Tensor) -> Tensor:
        """Return [num_tokens, out_features of the rank] for x [num_tokens, in_features of the rank].

        The bias is added; of a "row" shard by rank 0 alone.
        """

    @abstractmethod
    def grouped_matmul(
        self, x: Tensor, groups: ExpertGroups, activation: GatedActivation | None = None
    ) -> Tensor:
        """Return for each pair of a token and an expert its row of x times the expert's weights.

        The result is [num_pairs, n]; x [num_tokens or num_pairs, in_features of the rank]. The bias is added
        as in `matmul`. An activation is of the two outputs, gate and up: n is half the features then. A
        format that cannot do this raises ModelError when it is made with experts.
        """

    def grouped_sum(
        self,
        x: Tensor,
        groups: ExpertGroups,
        weights: Tensor,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
    ) -> Tensor:
        """Return each token's weighted sum of `grouped_matmul` over its experts, [num_tokens, out_features].

        x [num_pairs, in_features of the rank]; the rest as in `expert_sum`.
        """
        return expert_sum(self.grouped_matmul(x, groups), weights, shared, shared_gate)

    def embed(self, indices: Tensor) -> Tensor:
        """Return rows of the weight, [n, in_features] in the model's dtype, by indices [n].

        Called only if `embeds` is True.
        """
        raise AssertionError(f"{type(self).__name__} does not embed")

    def share(self, table: Tensor) -> bool:
        """Use the table of the tied embedding, [vocab_size, hidden_size], as the weight of the output head.

        Returns False if the format cannot; the decoder then fills the table in as `weight`. Not called if
        the embedding looks its rows up in these weights.
        """
        return False


class UnquantizedWeights(LinearWeights):
    """Weights that are loaded from unquantized tensors, in whatever form they are kept.

    The rank's rows of all outputs are stacked in one matrix, so that one product computes them all; those of
    one expert follow those of another.
    """

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: torch.device, shard: Shard) -> None:
        self._dtype = dtype
        self._device = device
        self._columns = slice(0, shape.in_features)
        if shape.shard == "row":
            self._columns = shard.slice(shape.in_features)
        self._parameters: dict[str, tuple[int, ...]] = {}
        self._rows: dict[str, tuple[slice, int]] = {}  # rows taken of each output, and where they go
        self.num_experts = shape.num_experts
        self.out_features = 0  # of all experts
        for name, features in shape.all_outputs.items():
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

    def _by_expert(self, rows: Tensor) -> Tensor:
        """Return a view of the rows of all experts, [num_experts, rows of one expert, ...]."""
        return rows.view(self.num_experts, -1, *rows.shape[1:])

    @abstractmethod
    def _fill_rows(self, first: int, rows: Tensor) -> None:
        """Store rows [num_rows, in_features of the whole model] from row `first` on."""

    def random(self, parameter: str, generator: torch.Generator) -> Tensor:
        shape = self._parameters[parameter]
        values = torch.randn(shape, dtype=self._dtype, device=generator.device, generator=generator)
        return values.mul_(shape[-1] ** -0.5)


MakeWeights = Callable[[LinearShape, torch.dtype, torch.device, Shard], LinearWeights]
"""Makes the weights of one Linear: mostly a subclass of LinearWeights."""

MakeLinear = Callable[[str, LinearShape], LinearWeights]
"""Makes the weights of the Linear at an address, such as `layers.0.attention.qkv`.

`EMBEDDING` is the address of an embedding that is not the output head's table: it is used if it `embeds`.
"""

EMBEDDING = "embedding"
OUTPUT_HEAD = "output"

Conversion = Callable[[torch.dtype, torch.device, Shard], MakeLinear]
"""Returns the maker of a model's linears, filled from unquantized tensors and chosen by a setting.

dtype: of activations and results. A format may choose another for single addresses.
"""

MakeStored = Callable[[Sequence[str], LinearShape], LinearWeights]
"""Makes the weights of the Linear that modules of a checkpoint fill, such as `model.layers.0.mlp.down_proj`.

There is one module for each output, or one that has them all; of experts those of the first.
"""

StoredFormat = Callable[[Mapping[str, Any], torch.dtype, torch.device, Shard], MakeStored]
"""Returns the maker of a model's linears, filled from tensors as a checkpoint stores them.

Takes the checkpoint's quantization_config, then what a Conversion takes. Modules that the configuration
lists in `modules_to_not_convert`, and tied output heads, do not come to it.
"""
