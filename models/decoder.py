"""THE decoder-only transformer, drawn from a DecoderSpec."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.paged_attention import AttentionBatch
from models.formats.base import LinearShape
from models.layers import Attention, Embedding, Leaf, Linear, Mlp, Norm, Part
from models.rope import cos_sin_table
from models.spec import DecoderSpec, LayerSpec


@dataclass(frozen=True)
class ForwardBatch:
    """The tokens of one step, row after row: token_ids and positions [num_tokens] int64.

    `wanted` int64 [num_wanted]: the tokens whose hidden states are asked for; None: all.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    wanted: Tensor | None = None


class DecoderLayer(Part):
    """Attention and MLP, each with the norm that stands before it."""

    def __init__(self, layer: LayerSpec, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        size = spec.hidden_size
        self.attention_norm = Norm(size, spec.norm_eps, dtype, device)
        self.attention = Attention(layer.attention, size, dtype, device)
        self.mlp_norm = Norm(size, spec.norm_eps, dtype, device)
        self.mlp = Mlp(layer.mlp, size, dtype, device)


class Decoder(Part):
    """Token ids in, hidden states and logits out. Holds no state of its own between steps.

    Newly made it has no weights: the loader fills `slots()`, then calls `finish()`.
    """

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.embedding = Embedding((spec.vocab_size, spec.hidden_size), dtype, device)
        self.layers = [DecoderLayer(layer, spec, dtype, device) for layer in spec.layers]
        self.norm = Norm(spec.hidden_size, spec.norm_eps, dtype, device)
        self.output = Linear(LinearShape(spec.hidden_size, {"": spec.vocab_size}), dtype, device)
        self.cos_sin = cos_sin_table(spec.rope, spec.max_position, device)
        # The norm before the next block is computed together with the residual sum after this one.
        self._next_norms = [*(layer.attention_norm for layer in self.layers[1:]), self.norm]

    def leaves(self) -> Iterator[tuple[str, Leaf]]:
        yield from super().leaves()
        for index, layer in enumerate(self.layers):
            for path, leaf in layer.leaves():
                yield f"layers.{index}.{path}", leaf

    def slots(self) -> dict[str, tuple[Leaf, str, tuple[int, ...]]]:
        """Every tensor wanted from a checkpoint: address -> (leaf, slot of that leaf, shape)."""
        return {
            f"{path}.{slot}": (leaf, slot, shape)
            for path, leaf in self.leaves()
            if not (leaf is self.output and self.spec.tie_embeddings)
            for slot, shape in leaf.slots().items()
        }

    def finish(self) -> None:
        """All slots are filled: let a tied output read the embedding's table."""
        if self.spec.tie_embeddings:
            self.output.weights.share(self.embedding.weight)

    def __call__(self, batch: ForwardBatch, kv: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the hidden states of the wanted tokens after the final norm, [num_wanted, hidden_size].

        kv holds (k_cache, v_cache) [num_pages, page_size, num_kv_heads, head_dim] per layer; this step's keys
        and values are written at `batch.attention.slot_mapping`. Positions must be below `spec.max_position`.
        """
        attention = batch.attention
        queries, residual, angles = self.begin(
            batch.token_ids, batch.positions, attention.slot_mapping, kv[0]
        )
        mixed = self.layers[0].attention.mix(queries, attention, *kv[0])
        for index, caches in enumerate(kv[1:]):
            queries = self.between(index, mixed, residual, angles, attention.slot_mapping, caches)
            mixed = self.layers[index + 1].attention.mix(queries, attention, *caches)
        return self.end(mixed, residual, batch.wanted)

    # The pieces between attentions: what each token goes through by itself, whichever row it belongs to.

    def begin(
        self, token_ids: Tensor, positions: Tensor, slot_mapping: Tensor, kv: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All before the first layer's attention, whose caches are `kv`: (queries, residual, angles).

        queries [num_tokens, num_heads, head_dim]; residual [num_tokens, hidden_size], which the later pieces
        add to in place; angles [num_tokens, 2, rotary_dim / 2] fp32, the same for all layers.
        """
        angles = self.cos_sin[positions]
        residual = self.embedding(token_ids)
        layer = self.layers[0]
        queries = layer.attention.project(layer.attention_norm(residual), angles, slot_mapping, *kv)
        return queries, residual, angles

    def between(
        self,
        index: int,
        mixed: Tensor,
        residual: Tensor,
        angles: Tensor,
        slot_mapping: Tensor,
        kv: tuple[Tensor, Tensor],
    ) -> Tensor:
        """From what layer `index` attended to, to the queries of the next layer, whose caches are `kv`."""
        hidden = self._behind(index, mixed, residual)
        return self.layers[index + 1].attention.project(hidden, angles, slot_mapping, *kv)

    def end(self, mixed: Tensor, residual: Tensor, wanted: Tensor | None) -> Tensor:
        """All behind the last layer's attention, where nobody looks at tokens that are not wanted."""
        if wanted is not None:
            mixed, residual = mixed[wanted], residual[wanted]
        return self._behind(len(self.layers) - 1, mixed, residual)

    def _behind(self, index: int, mixed: Tensor, residual: Tensor) -> Tensor:
        """The rest of a layer, with the norm that stands behind it."""
        layer = self.layers[index]
        hidden = layer.mlp_norm.add(layer.attention.output(mixed), residual)
        return self._next_norms[index].add(layer.mlp(hidden), residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] -> logits [num_rows, vocab_size] fp32."""
        return self.output(hidden).float()
