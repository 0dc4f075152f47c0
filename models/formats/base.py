"""Interfaces between a Linear and its weight format."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor


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
    """

    in_features: int
    outputs: Mapping[str, int]
    bias: bool = False
    shard: Literal["column", "row"] | None = None

    @property
    def out_features(self) -> int:
        """Features of all outputs together."""
        return sum(self.outputs.values())


class LinearWeights(ABC):
    """The weights of one Linear in one format, of one rank: filled once, packed, then only multiplied.

    Its parameters are the checkpoint's whole tensors; slicing them for the rank is part of filling.
    """

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

    def share(self, table: Tensor) -> bool:
        """Multiply by an embedding's table [out_features, in_features] in place of weights of its own.

        Returns False where the format cannot: the table is then filled in as `weight`.
        """
        return False


MakeLinear = Callable[[str, LinearShape], LinearWeights]
"""Makes the weights of the Linear at an address, such as `layers.0.attention.qkv`."""


class WeightFormat(Protocol):
    """The interface of a format's module."""

    CONVERTS: bool
    """Its parameters are unquantized tensors: the format is chosen by a setting, not by the checkpoint."""

    def linear_maker(
        self, options: Mapping[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard
    ) -> MakeLinear:
        """Return the maker of a model's linears. `options` is the checkpoint's quantization_config.

        dtype: of activations and results. A format may choose another for single addresses.
        """
