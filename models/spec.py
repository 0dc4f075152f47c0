"""DecoderSpec: an architecture as plain values.

A family file reads a checkpoint's configuration into one; `decoder.py` builds the model from it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from kernels.expert_routing import RouterOptions
from kernels.grouped_linear import GatedActivation
from models.errors import ModelError
from models.rope import LongRopeScaling, RopeSpec

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""gelu: exact; gelu_tanh: its tanh approximation; relu2: the square of relu."""

NormPlacement = Literal["before", "after", "both", "parallel"]
"""Where a layer has norms.

before: on the input of attention and of the MLP, as in Llama. after: on their outputs, before the residual
addition, as in OLMo 2. both: on inputs and outputs, as in Gemma 2. parallel: one on the layer's input, which
attention and MLP share; the outputs of both are added to it, as in GPT-J.
"""


@dataclass(frozen=True)
class NormSpec:
    """The norm of a model: RMSNorm or LayerNorm, times `offset + weight`, plus a bias if it has one.

    fp32_weight: RMSNorm multiplies by the weight in fp32, before the only rounding. Otherwise the normalised
    value is rounded to the model's dtype first.
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    bias: bool = False
    fp32_weight: bool = False

    def __post_init__(self) -> None:
        if self.bias if self.kind == "rms" else self.fp32_weight:
            raise ValueError(f"no norm is computed like this: {self}")


QKNormKind = Literal["rms", "rms_of_projection", "layer_norm_per_head"]
"""How q and k are normalised.

rms: RMSNorm of each head, one weight for all heads of q and one for those of k, as in Qwen3.
rms_of_projection: RMSNorm over all heads together, as in OLMo 2. layer_norm_per_head: LayerNorm of each head
with a weight of its own and no bias, as in Cohere.
"""


@dataclass(frozen=True)
class AttentionSpec:
    """Self-attention of one layer: grouped queries, causal, optionally within a sliding window.

    Its scores are `scale * q·k`, bounded to `softcap * tanh(score / softcap)` if softcap > 0.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None  # None: q and k are not rotated
    qkv_bias: bool = False
    output_bias: bool = False
    window: int = 0  # tokens a query sees, its own included; 0: all
    qk_norm: QKNormKind | None = None  # before the rotation, with the eps of the model's norm
    scale: float | None = None  # None: head_dim ** -0.5
    softcap: float = 0.0
    sinks: bool = False  # a learned logit per query head joins the softmax and has no value
    clip_qkv: float = 0.0  # bound on absolute values of q, k and v before the rotation; 0: none

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads evenly"
            )
        if self.rope is not None and self.rope.dim > self.head_dim:
            raise ValueError(f"{self.rope.dim} elements of a head of {self.head_dim} cannot be rotated")
        if self.clip_qkv and self.qk_norm in ("rms", "layer_norm_per_head"):
            raise ValueError("clip_qkv cannot follow a norm of each head")


@dataclass(frozen=True)
class MlpSpec:
    """The feed-forward block of one layer: down(act(gate(x)) * up(x)), or without gate down(act(up(x)))."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True

    def __post_init__(self) -> None:
        if self.gated and self.activation in ("relu", "relu2"):
            raise ModelError(f"activation '{self.activation}' is not supported in a gated MLP")


@dataclass(frozen=True)
class MoeSpec:
    """The mixture-of-experts block of one layer: gated blocks of which a router chooses some for each token.

    `intermediate_size` is that of one expert, `bias` says that experts have biases. `shared` is an expert
    that all tokens use, its result multiplied by a sigmoid if `shared_gate`. Of the router's biases
    `router_bias` is added to the logits, `correction_bias` to the scores that experts are chosen by.
    """

    num_experts: int
    intermediate_size: int
    router: RouterOptions
    activation: GatedActivation
    bias: bool = False
    router_bias: bool = False
    correction_bias: bool = False
    shared: MlpSpec | None = None
    shared_gate: bool = False

    def __post_init__(self) -> None:
        router = self.router
        if not 0 < router.top_k <= self.num_experts:
            raise ValueError(f"a token cannot have {router.top_k} of {self.num_experts} experts")
        size = self.num_experts // router.num_groups
        if router.num_groups > 1 and (size < 2 or size * router.num_groups != self.num_experts):
            raise ValueError(
                f"{self.num_experts} experts cannot make {router.num_groups} groups of two or more"
            )
        if not 0 < router.top_groups <= router.num_groups or router.top_groups * size < router.top_k:
            raise ValueError(
                f"{router.top_k} experts cannot be in {router.top_groups} of {router.num_groups} groups"
            )


@dataclass(frozen=True)
class StateSpec:
    """Memory of a fixed size that one layer keeps for each sequence: of a recurrence, or a short convolution.

    It is zero before a sequence's first token.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: attention and MLP, added to the residual stream, with norms around them."""

    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec
    norms: NormPlacement = "before"
    state: StateSpec | None = None


# Pages of all groups have the size of the largest group; a group with fewer layers leaves the rest of its
# pages unused. So the size is the number of layers of the least frequent kind, of which the others usually
# have a multiple: 8 full layers and 40 with a window are six groups of 8. But 12 and 13 would become 12, 7
# and 6, where one group for each kind leaves a 13th of the pages of one unused. Below this ratio of the
# numbers, that of the most frequent kind is the size; less than a fifth of a page is unused then.
_NEARLY_EQUAL = 1.25


@dataclass(frozen=True)
class KVGroup:
    """Layers whose keys and values have one shape and one lifetime, and so share a page table.

    `window`: tokens a query sees, its own included; 0: all.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int

    @property
    def token_size(self) -> int:
        """Elements of the keys (or of the values) of one token in one layer."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer. `max_position` is its context window in tokens.

    It has one head: a language model head, or with `num_labels` above 0 a score head of that many outputs.
    Embeddings are multiplied by `embedding_scale`, rounded to the model's dtype; what a layer adds to the
    residual stream by `residual_multiplier`. Logits are `logits_scale` times the product, then
    `logits_softcap * tanh(logits / logits_softcap)` unless that is 0.
    """

    vocab_size: int
    hidden_size: int
    max_position: int
    norm: NormSpec
    tie_embeddings: bool
    layers: tuple[LayerSpec, ...]
    num_labels: int = 0
    num_mtp_layers: int = 0  # for multi-token prediction, stored after the others; not loaded
    head_bias: bool = False
    embedding_scale: float = 1.0
    residual_multiplier: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float = 0.0

    def __post_init__(self) -> None:
        if self.tie_embeddings and self.head_bias:
            raise ValueError("an output head that is tied to the embedding has no bias")
        if self.norm.kind == "layer" and any(layer.norms in ("after", "both") for layer in self.layers):
            raise ModelError("LayerNorm on the outputs of attention and MLP is not supported")

    def with_attention(self, change: Callable[[int, AttentionSpec], AttentionSpec]) -> "DecoderSpec":
        """Return the spec with each layer's attention replaced by `change(layer index, attention)`."""
        layers = enumerate(self.layers)
        changed = (replace(layer, attention=change(index, layer.attention)) for index, layer in layers)
        return replace(self, layers=tuple(changed))

    @property
    def short_context(self) -> int | None:
        """Length in tokens up to which a sequence has the short divisors of LongRoPE; None: without it."""
        for layer in self.layers:
            scaling = layer.attention.rope and layer.attention.rope.scaling
            if isinstance(scaling, LongRopeScaling) and scaling.original_max_position < self.max_position:
                return scaling.original_max_position
        return None

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads per layer; all layers of the known families have the same number."""
        return self.layers[0].attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of one head of q, k and v."""
        return self.layers[0].attention.head_dim

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The layers grouped by their KV cache, kinds in order of first appearance.

        Layers of one kind are divided into groups of equal size, but for a last one that may have fewer, so
        that a page of any group is one page in each of as many tensors.
        """
        kinds: dict[tuple[int, int, int], list[int]] = {}
        for index, layer in enumerate(self.layers):
            a = layer.attention
            kinds.setdefault((a.num_kv_heads, a.head_dim, a.window), []).append(index)
        counts = [len(layers) for layers in kinds.values()]
        size = max(counts) if max(counts) < min(counts) * _NEARLY_EQUAL else min(counts)
        return tuple(
            KVGroup(tuple(layers[first :: -(-len(layers) // size)]), *shape)
            for shape, layers in kinds.items()
            for first in range(-(-len(layers) // size))
        )

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The states of the layers that have one, in the order of the layers."""
        return tuple(layer.state for layer in self.layers if layer.state is not None)

    @property
    def kv_places(self) -> tuple[tuple[int, int], ...]:
        """For each layer the index of its KV group, and its own index in that."""
        places = {
            layer: (group_index, index)
            for group_index, group in enumerate(self.kv_groups)
            for index, layer in enumerate(group.layers)
        }
        return tuple(places[layer] for layer in range(self.num_layers))
