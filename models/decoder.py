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
        mixed, residual = self.begin(batch, kv)
        return self.end(mixed, residual, batch.wanted)

    def begin(
        self, batch: ForwardBatch, kv: Sequence[tuple[Tensor, Tensor]], mixed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """All up to the last layer's attention: (mixed, residual).

        mixed [num_tokens, num_heads * head_dim]: what the queries attended to, in the argument if given;
        residual [num_tokens, hidden_size], which `end` adds to in place.
        """
        angles = self.cos_sin[batch.positions]  # [num_tokens, 2, rotary_dim / 2] fp32
        residual = self.embedding(batch.token_ids)
        hidden = self.layers[0].attention_norm(residual)
        for index, (layer, caches) in enumerate(zip(self.layers, kv, strict=True)):
            queries = layer.attention.project(hidden, angles, batch.attention.slot_mapping, *caches)
            attended = layer.attention.mix(queries, batch.attention, *caches, out=mixed)
            if index < len(self.layers) - 1:
                hidden = self._behind(index, attended, residual)
        return attended, residual

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

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [num_rows, hidden_size] -> logits [num_rows, vocab_size] fp32; in `out`, if it is given."""
        logits = self.output(hidden)
        return logits.float() if out is None else out.copy_(logits)
