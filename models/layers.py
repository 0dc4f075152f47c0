"""The parts of a decoder. Each declares the tensors it loads from a checkpoint as parameters.

A parameter's address is its path below the decoder: `layers.0.attention.qkv.q.weight`. The loader fills every
parameter exactly once; nothing is allocated before that.

Parts are plain objects, not nn.Modules: their calls and attribute look-ups take more than half of the Python
time of a forward pass, 2 % of a SmolLM2-135M decode step on two cores, and inference uses none of their
features.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.act_mul import gelu_mul, gelu_tanh_mul, silu_mul
from kernels.layer_norm import add_layer_norm, layer_norm
from kernels.rms_norm import add_rms_norm, rms_norm
from models.formats.base import LinearShape, LinearWeights, Shard
from models.forward_batch import ForwardBatch
from models.spec import MlpSpec, NormSpec

_GATED_ACTIVATIONS = {"silu": silu_mul, "gelu": gelu_mul, "gelu_tanh": gelu_tanh_mul}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square_(),
}


class Part:
    """A piece of a decoder, made of other parts and of leaves."""

    def leaves(self) -> Iterator[tuple[str, "Leaf"]]:
        """Yield the address and the leaf of every leaf below this part."""
        for name, value in vars(self).items():
            if isinstance(value, Leaf):
                yield name, value
            elif isinstance(value, Part):
                for path, leaf in value.leaves():
                    yield f"{name}.{path}", leaf


class Leaf(ABC):
    """A part that holds tensors of the checkpoint."""

    @abstractmethod
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors it loads: name below the leaf -> shape."""

    @abstractmethod
    def fill(self, name: str, tensor: Tensor) -> None:
        """Load one parameter, converted to the leaf's dtype and device."""

    @abstractmethod
    def random(self, name: str, generator: torch.Generator) -> Tensor:
        """Return a random tensor for one parameter, on the generator's device."""


class LinearLeaf(Leaf):
    """A leaf with the weights of linear maps, which the weight format keeps and multiplies."""

    weights: LinearWeights
    """Made by the decoder, which knows the linear's address."""

    def __init__(self, shape: LinearShape) -> None:
        self.shape = shape

    def parameters(self) -> dict[str, tuple[int, ...]]:
        return self.weights.parameters()

    def fill(self, name: str, tensor: Tensor) -> None:
        self.weights.fill(name, tensor)

    def random(self, name: str, generator: torch.Generator) -> Tensor:
        return self.weights.random(name, generator)


class Linear(LinearLeaf):
    """x Wᵀ + b with one or several fused outputs."""

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return [num_tokens, out_features] for x [num_tokens, in_features], the tokens of `batch`."""
        return self.weights.matmul(x)


class _SingleTensor(Leaf):
    """A leaf with one tensor, `weight`, allocated when it is filled."""

    weight: Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device = device

    def parameters(self) -> dict[str, tuple[int, ...]]:
        return {"weight": self._shape}

    def fill(self, name: str, tensor: Tensor) -> None:
        self.weight = torch.empty(self._shape, dtype=self._dtype, device=self._device).copy_(tensor)

    def random(self, name: str, generator: torch.Generator) -> Tensor:
        shape, device = self._shape, generator.device
        values = torch.randn(shape, dtype=self._dtype, device=device, generator=generator)
        return values.mul_(shape[-1] ** -0.5)


class Embedding(_SingleTensor):
    """A table [vocab_size, hidden_size] of rows by token id, which are multiplied by `scale`."""

    def __init__(
        self, shape: tuple[int, int], scale: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(shape, dtype, device)
        self._scale = torch.tensor(scale, dtype=dtype).item()

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Return the scaled rows of the batch's tokens, [num_tokens, hidden_size]."""
        rows = F.embedding(batch.token_ids, self.weight)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)


class PackedEmbedding(LinearLeaf):
    """An embedding whose table is in a weight format: the output head's own weights, or others.

    `head`: weights of a tied output head that keeps a table of its own, since ranks divide it.
    """

    def __init__(
        self, weights: LinearWeights, shape: LinearShape, scale: float, head: LinearWeights | None
    ) -> None:
        super().__init__(shape)
        self.weights = weights
        self._scale = scale
        self._head = head

    def fill(self, name: str, tensor: Tensor) -> None:
        super().fill(name, tensor)
        if self._head is not None:
            self._head.fill(name, tensor)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Return the scaled rows of the batch's tokens, [num_tokens, hidden_size]."""
        rows = self.weights.embed(batch.token_ids)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)


class ScoreHead(_SingleTensor):
    """A linear map to scores, weight fp32 [num_labels, hidden_size]."""

    def __init__(self, num_labels: int, hidden_size: int, device: torch.device) -> None:
        super().__init__((num_labels, hidden_size), torch.float32, device)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return scores fp32 [num_rows, num_labels] of hidden [num_rows, hidden_size]."""
        return F.linear(hidden.float(), self.weight)


class Norm(_SingleTensor):
    """RMSNorm (Zhang and Sennrich, 2019), alone or after an addition to the residual stream."""

    def __init__(
        self, size: int, spec: NormSpec, multiplier: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__((size,), torch.float32 if spec.fp32_weight else dtype, device)
        self.eps = spec.eps
        self._offset = spec.offset
        self._multiplier = multiplier

    def fill(self, name: str, tensor: Tensor) -> None:
        super().fill(name, tensor.float() + self._offset if self._offset else tensor)

    def random(self, name: str, generator: torch.Generator) -> Tensor:
        return torch.full(self._shape, 1.0 - self._offset, dtype=self._dtype, device=generator.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x [num_tokens, size] as a new tensor."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor, x_norm: "Norm | None" = None) -> Tensor:
        """Add x times the multiplier to the residual stream in place; return the norm of the sum.

        x, residual and the result are [num_tokens, size]. With `x_norm`, x is normalised by it first.
        """
        x_weight = None if x_norm is None else x_norm.weight
        return add_rms_norm(x, residual, self.weight, self.eps, self._multiplier, x_weight)


class LayerNorm(Norm):
    """LayerNorm (Ba et al., 2016), alone or after an addition to the residual stream."""

    def __init__(
        self, size: int, spec: NormSpec, multiplier: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(size, spec, multiplier, dtype, device)
        self._has_bias = spec.bias
        self.bias: Tensor | None = None

    def parameters(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("weight", "bias") if self._has_bias else ("weight",), self._shape)

    def fill(self, name: str, tensor: Tensor) -> None:
        filled = torch.empty(self._shape, dtype=self._dtype, device=self._device).copy_(tensor)
        setattr(self, name, filled.add_(self._offset) if name == "weight" else filled)

    def random(self, name: str, generator: torch.Generator) -> Tensor:
        value = 1.0 - self._offset if name == "weight" else 0.0
        return torch.full(self._shape, value, dtype=self._dtype, device=generator.device)

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor, x_norm: Norm | None = None) -> Tensor:
        assert x_norm is None
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps, self._multiplier)


class NoNorm:
    """Takes the place of a norm where a layer reads the residual stream itself."""

    def __init__(self, eps: float, multiplier: float) -> None:
        self._eps = eps
        self._multiplier = multiplier

    def __call__(self, x: Tensor) -> Tensor:
        """Return x itself."""
        return x

    def add(self, x: Tensor, residual: Tensor, x_norm: Norm | None = None) -> Tensor:
        """Do what `Norm.add` does, but return the sum itself."""
        x_weight = None if x_norm is None else x_norm.weight
        return add_rms_norm(x, residual, None, self._eps, self._multiplier, x_weight)


class OfHeads(_SingleTensor):
    """A tensor with a row for each head, of which a rank keeps those of its heads."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, shard: Shard
    ) -> None:
        super().__init__(shape, dtype, device)
        self._rows = shard.slice(shape[0])

    def fill(self, name: str, tensor: Tensor) -> None:
        rows = tensor[self._rows]
        self.weight = torch.empty(rows.shape, dtype=self._dtype, device=self._device).copy_(rows)


@dataclass(frozen=True)
class NormMaker:
    """Makes a model's norms, of which there is one kind. `multiplier`: of what they add to the residual."""

    spec: NormSpec
    multiplier: float
    dtype: torch.dtype
    device: torch.device

    def __call__(self, size: int) -> Norm:
        """Return a norm of vectors of a size."""
        kind = LayerNorm if self.spec.kind == "layer" else Norm
        return kind(size, self.spec, self.multiplier, self.dtype, self.device)


class Mlp(Part):
    """The gated feed-forward block (Shazeer, 2020)."""

    def __init__(self, spec: MlpSpec, hidden_size: int) -> None:
        halves = {"gate": spec.intermediate_size, "up": spec.intermediate_size}
        self.gate_up = Linear(LinearShape(hidden_size, halves, spec.bias, shard="column"))
        self.down = Linear(LinearShape(spec.intermediate_size, {"": hidden_size}, spec.bias, shard="row"))
        self._activation = _GATED_ACTIVATIONS[spec.activation]

    def __call__(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the block's output, [num_tokens, hidden_size], for hidden of that shape."""
        return self.down(self._activation(self.gate_up(hidden, batch)), batch)


class UngatedMlp(Part):
    """The feed-forward block of GPT-2: a projection, an activation, a projection."""

    def __init__(self, spec: MlpSpec, hidden_size: int) -> None:
        self.up = Linear(LinearShape(hidden_size, {"": spec.intermediate_size}, spec.bias, shard="column"))
        self.down = Linear(LinearShape(spec.intermediate_size, {"": hidden_size}, spec.bias, shard="row"))
        self._activation = _ACTIVATIONS[spec.activation]

    def __call__(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the block's output, [num_tokens, hidden_size], for hidden of that shape."""
        return self.down(self._activation(self.up(hidden, batch)), batch)
