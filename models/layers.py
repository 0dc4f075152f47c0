"""The parts a decoder is drawn from. Each declares the checkpoint tensors it wants as slots.

A slot's name is its address below the decoder: `layers.0.attention.qkv.q.weight`. The loader fills every slot
exactly once; nothing is allocated before that.

Parts are plain objects, not nn.Modules: their calls and attribute look-ups take more than half of the Python
time of a forward pass, 2 % of a SmolLM2-135M decode step on two cores, and inference has no use for what they
offer.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels.act_mul import gelu_mul, silu_mul
from kernels.paged_attention import AttentionBatch, paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope_kv_write import rope_kv_write
from models.formats.base import LinearShape
from models.formats.dense import DenseWeights
from models.spec import AttentionSpec, MlpSpec

_ACTIVATIONS = {"silu": silu_mul, "gelu_tanh": gelu_mul}


class Part:
    """A piece of a decoder, made of other parts and of leaves."""

    def leaves(self) -> Iterator[tuple[str, "Leaf"]]:
        """Every leaf below this part, with its address."""
        for name, value in vars(self).items():
            if isinstance(value, Leaf):
                yield name, value
            elif isinstance(value, Part):
                for path, leaf in value.leaves():
                    yield f"{name}.{path}", leaf


class Leaf(ABC):
    """A part with tensors of the checkpoint directly in it."""

    @abstractmethod
    def slots(self) -> dict[str, tuple[int, ...]]:
        """The tensors it wants: name below it -> shape."""

    @abstractmethod
    def fill(self, slot: str, tensor: Tensor) -> None:
        """Take in the tensor of one slot, converted to its own dtype and device."""


class Linear(Leaf):
    """x Wᵀ + b with one or several fused outputs; the weight format does the work."""

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> None:
        self.weights = DenseWeights(shape, dtype, device)

    def slots(self) -> dict[str, tuple[int, ...]]:
        return self.weights.slots()

    def fill(self, slot: str, tensor: Tensor) -> None:
        self.weights.fill(slot, tensor)

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, in_features] -> [num_tokens, out_features]."""
        return self.weights.matmul(x)


class _SingleTensor(Leaf):
    """A leaf with one tensor, `weight`, which is there once it is filled."""

    weight: Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device = device

    def slots(self) -> dict[str, tuple[int, ...]]:
        return {"weight": self._shape}

    def fill(self, slot: str, tensor: Tensor) -> None:
        self.weight = torch.empty(self._shape, dtype=self._dtype, device=self._device).copy_(tensor)


class Embedding(_SingleTensor):
    """Rows of a table [vocab_size, hidden_size] by token id."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [num_tokens] int64 -> [num_tokens, hidden_size]."""
        return F.embedding(token_ids, self.weight)


class Norm(_SingleTensor):
    """RMSNorm (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__((size,), dtype, device)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, size] -> its norm, a new tensor."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to the residual stream in place and return the norm of the sum, [num_tokens, size]."""
        return add_rms_norm(x, residual, self.weight, self.eps)


class Attention(Part):
    """Grouped-query self-attention over pages, with rotary positions: project(), mix(), then `output`."""

    def __init__(
        self, spec: AttentionSpec, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        outputs = {"q": queries, "k": keys, "v": keys}
        self.qkv = Linear(LinearShape(hidden_size, outputs, bias=spec.qkv_bias), dtype, device)
        self.output = Linear(LinearShape(queries, {"": hidden_size}, bias=spec.output_bias), dtype, device)
        self._head_dim = spec.head_dim
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self._scale = spec.scale
        self._window = spec.window

    def project(
        self, hidden: Tensor, angles: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """hidden [num_tokens, hidden_size] -> queries [num_tokens, num_heads, head_dim].

        Writes keys and values at slot_mapping [num_tokens]. angles [num_tokens, 2, rotary_dim / 2] fp32: cos
        and sin of each token's position.
        """
        heads = self.qkv(hidden).view(hidden.shape[0], -1, self._head_dim)
        q, k, v = torch.split_with_sizes(heads, self._heads, dim=1)
        rope_kv_write(q, k, v, angles, k_cache, v_cache, slot_mapping)
        return q

    def mix(
        self,
        queries: Tensor,
        attention: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """What the queries attend to, [num_tokens, num_heads * head_dim]; in `out`, if it is given."""
        if out is not None:
            out = out.view(queries.shape)
        mixed = paged_attention(
            queries, k_cache, v_cache, attention, scale=self._scale, window=self._window, out=out
        )
        return mixed.view(queries.shape[0], -1)


class Mlp(Part):
    """The gated feed-forward block (Shazeer, 2020)."""

    def __init__(self, spec: MlpSpec, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        halves = {"gate": spec.intermediate_size, "up": spec.intermediate_size}
        self.gate_up = Linear(LinearShape(hidden_size, halves, bias=spec.bias), dtype, device)
        self.down = Linear(
            LinearShape(spec.intermediate_size, {"": hidden_size}, bias=spec.bias), dtype, device
        )
        self._activation = _ACTIVATIONS[spec.activation]

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [num_tokens, hidden_size] -> the same shape."""
        return self.down(self._activation(self.gate_up(hidden)))
