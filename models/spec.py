"""DecoderSpec: everything the decoder must know about an architecture, as plain values.

A family file turns a checkpoint's configuration into one of these; `decoder.py` draws the model from it.
"""

from dataclasses import dataclass
from typing import Literal

from models.rope import RopeSpec

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class AttentionSpec:
    """Self-attention of one layer: grouped queries, causal, optionally within a sliding window."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    window: int = 0  # tokens a query sees, its own included; 0: all

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads evenly"
            )

    @property
    def scale(self) -> float:
        """Factor on q·k before the softmax."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True)
class MlpSpec:
    """The gated feed-forward block of one layer: down(act(gate(x)) * up(x))."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: norm, attention, residual, norm, MLP, residual."""

    attention: AttentionSpec
    mlp: MlpSpec


@dataclass(frozen=True)
class KVGroup:
    """Layers whose keys and values have one shape and one lifetime, and so can share a page table."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer. `max_position` is its context window in tokens."""

    vocab_size: int
    hidden_size: int
    max_position: int
    norm_eps: float
    tie_embeddings: bool
    rope: RopeSpec
    layers: tuple[LayerSpec, ...]

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads per layer; every layer of today's families has the same."""
        return self.layers[0].attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of one head of q, k and v."""
        return self.layers[0].attention.head_dim

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The layers grouped by what their KV cache looks like, in order of first appearance."""
        groups: dict[tuple[int, int, int], list[int]] = {}
        for index, layer in enumerate(self.layers):
            a = layer.attention
            groups.setdefault((a.num_kv_heads, a.head_dim, a.window), []).append(index)
        return tuple(KVGroup(tuple(layers), *shape) for shape, layers in groups.items())
