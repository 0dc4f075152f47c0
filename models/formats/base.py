"""What a Linear declares, and what a weight format does with it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LinearShape:
    """A linear map of `in_features` to one or several fused outputs, name -> features, in order.

    A single output has the name "". Each output is one tensor of the checkpoint.
    """

    in_features: int
    outputs: Mapping[str, int]
    bias: bool = False

    @property
    def out_features(self) -> int:
        """Features of all outputs together."""
        return sum(self.outputs.values())


class LinearWeights(ABC):
    """The weights of one Linear in one format. Filled tensor by tensor, packed once, then only multiplied."""

    @abstractmethod
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """The tensors it wants from the checkpoint: name, such as `q.weight`, and shape."""

    @abstractmethod
    def fill(self, parameter: str, tensor: Tensor) -> None:
        """Take in one of them, of any float dtype and on any device."""

    @abstractmethod
    def matmul(self, x: Tensor) -> Tensor:
        """x [num_tokens, in_features] -> [num_tokens, out_features], bias added."""
