"""The decoder-only transformer that a DecoderSpec describes."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.kv_layer import KVLayer
from kernels.logits import scaled_logits
from models.attention import Attention, Rotary, make_rotary
from models.formats.base import EMBEDDING, WHOLE, LinearShape, MakeLinear, Shard
from models.forward_batch import ForwardBatch
from models.layers import (
    Embedding,
    Leaf,
    Linear,
    LinearLeaf,
    NoNorm,
    Norm,
    NormMaker,
    PackedEmbedding,
    Part,
    ScoreHead,
)
from models.moe import MlpMaker
from models.spec import DecoderSpec, LayerSpec, NormPlacement


class DecoderLayer(Part):
    """Attention, then the MLP: each with a norm on its input, on its output, or on both."""

    def __init__(
        self,
        layer: LayerSpec,
        spec: DecoderSpec,
        rotary: Rotary | None,
        shard: Shard,
        norm: NormMaker,
        mlp: MlpMaker,
        kv_group: int,
    ) -> None:
        size, none = spec.hidden_size, NoNorm(spec.norm.eps, spec.residual_multiplier)
        before, after = layer.norms != "after", layer.norms in ("after", "both")
        self.attention_norm = norm(size) if before else none
        self.attention = Attention(layer.attention, size, rotary, shard, norm, kv_group)
        self.attention_output_norm = norm(size) if after else None
        self.mlp_norm = norm(size) if before else none
        self.mlp = mlp(layer.mlp)
        self.mlp_output_norm = norm(size) if after else None

    def finish(
        self,
        attended: Tensor,
        hidden: Tensor | None,
        residual: Tensor,
        batch: ForwardBatch,
        next_norm: Norm | NoNorm,
    ) -> Tensor:
        """Compute the layer from the attention's output projection on, and the norm that follows the layer.

        attended [num_tokens, num_heads * head_dim]; hidden [num_tokens, hidden_size]: the attention's input,
        None if it is not at hand; residual [num_tokens, hidden_size], which is added to in place.
        """
        x = self.attention.output(attended, batch)
        hidden = self.mlp_norm.add(x, residual, self.attention_output_norm)
        return next_norm.add(self.mlp(hidden, batch), residual, self.mlp_output_norm)


class ParallelLayer(Part):
    """Attention and the MLP side by side, after one norm (GPT-J; Wang and Komatsuzaki, 2021)."""

    def __init__(
        self,
        layer: LayerSpec,
        spec: DecoderSpec,
        rotary: Rotary | None,
        shard: Shard,
        norm: NormMaker,
        mlp: MlpMaker,
        kv_group: int,
    ) -> None:
        size = spec.hidden_size
        self.attention_norm = norm(size)
        self.attention = Attention(layer.attention, size, rotary, shard, norm, kv_group)
        self.mlp = mlp(layer.mlp)

    def finish(
        self,
        attended: Tensor,
        hidden: Tensor | None,
        residual: Tensor,
        batch: ForwardBatch,
        next_norm: Norm | NoNorm,
    ) -> Tensor:
        """Compute what `DecoderLayer.finish` does."""
        if hidden is None:
            hidden = self.attention_norm(residual)
        x = self.attention.output(attended, batch).add_(self.mlp(hidden, batch))
        return next_norm.add(x, residual)


_LAYERS: dict[NormPlacement, type[DecoderLayer] | type[ParallelLayer]] = {
    "before": DecoderLayer,
    "after": DecoderLayer,
    "both": DecoderLayer,
    "parallel": ParallelLayer,
}


class Decoder(Part):
    """Computes hidden states, and logits or scores, from token ids. Keeps no state between steps.

    It is built without weights: the loader fills `parameters()`, then calls `finish()`. `make_linear` makes
    the weights of each linear, in whatever format. With a shard of several ranks it computes its rank's part
    of each linear; combining the parts is left to the caller. The head is `output`, or `score` if the spec
    has labels.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        make_linear: MakeLinear,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = WHOLE,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.shard = shard
        self.kv_scales: tuple[tuple[float, float], ...] | None = None
        """Scales of keys and values in fp8, of each layer; None: all are 1."""
        shape = (spec.vocab_size, spec.hidden_size)
        self.embedding: Embedding | PackedEmbedding = Embedding(shape, spec.embedding_scale, dtype, device)
        # One table for all layers with equal specs: its rows are gathered once a step.
        rotaries = {
            rope: None if rope is None else make_rotary(rope, spec.short_context, spec.max_position, device)
            for rope in {layer.attention.rope for layer in spec.layers}
        }
        norm = NormMaker(spec.norm, spec.residual_multiplier, dtype, device)
        mlp = MlpMaker(spec.hidden_size, dtype, device)
        self.layers = [
            _LAYERS[layer.norms](layer, spec, rotaries[layer.attention.rope], shard, norm, mlp, kv_group)
            for layer, (kv_group, _) in zip(spec.layers, spec.kv_places, strict=True)
        ]
        self.norm = norm(spec.hidden_size)
        if spec.num_labels:
            self.score = ScoreHead(spec.num_labels, spec.hidden_size, device)
        else:
            head = LinearShape(spec.hidden_size, {"": spec.vocab_size}, spec.head_bias, shard="column")
            self.output = Linear(head)
        # The norm before the next block is fused with the residual addition after this one.
        self._next_norms = [*(layer.attention_norm for layer in self.layers[1:]), self.norm]
        for address, leaf in self.leaves():
            if isinstance(leaf, LinearLeaf):
                leaf.weights = make_linear(address, leaf.shape)
        table = LinearShape(spec.hidden_size, {"": spec.vocab_size})
        tied = self.output.weights if spec.tie_embeddings else None
        weights = tied if tied is not None and tied.embeds else make_linear(EMBEDDING, table)
        if weights.embeds:
            other_head = None if weights is tied else tied
            self.embedding = PackedEmbedding(weights, table, spec.embedding_scale, other_head)

    def leaves(self) -> Iterator[tuple[str, Leaf]]:
        yield from super().leaves()
        for index, layer in enumerate(self.layers):
            for path, leaf in layer.leaves():
                yield f"layers.{index}.{path}", leaf

    def parameters(self) -> dict[str, tuple[Leaf, str, tuple[int, ...]]]:
        """Return every tensor to load: address -> (leaf, name within the leaf, shape)."""
        return {
            f"{path}.{name}": (leaf, name, shape)
            for path, leaf in self.leaves()
            if not (self.spec.tie_embeddings and leaf is self.output)
            for name, shape in leaf.parameters().items()
        }

    def finish(self) -> None:
        """Complete the model after all parameters are filled: a tied output reads the embedding's table."""
        if not self.spec.tie_embeddings or isinstance(self.embedding, PackedEmbedding):
            return
        table = self.embedding.weight
        if not self.output.weights.share(table):
            self.output.fill("weight", table)

    def __call__(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> Tensor:
        """Return hidden states after the final norm at `batch.hidden_indices`, [num_hidden, hidden_size].

        kv: one KVLayer per layer; keys and values of this step are written at the `slot_mapping` of the
        layer's KV group. Positions must be below `spec.max_position`.
        """
        return self.tail(*self.body(batch, kv), batch)

    def body(
        self, batch: ForwardBatch, kv: Sequence[KVLayer], attention_out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute everything up to the last layer's attention; return (attention_out, residual).

        attention_out [num_tokens, num_heads * head_dim]: the last attention's result, in the argument if it
        is given; residual [num_tokens, hidden_size], which `tail` adds to in place.
        """
        residual = self.embedding(batch)
        hidden = self.layers[0].attention_norm(residual)
        last = self.layers[-1]
        for layer, kv_layer, next_norm in zip(self.layers, kv, self._next_norms, strict=True):
            attended = layer.attention.attend(hidden, batch, kv_layer, out=attention_out)
            if layer is not last:
                hidden = layer.finish(attended, hidden, residual, batch, next_norm)
        return attended, residual

    def tail(self, attention_out: Tensor, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute the last output projection, MLP and final norm, for the tokens at hidden_indices only."""
        if batch.hidden_indices is not None:
            attention_out, residual = attention_out[batch.hidden_indices], residual[batch.hidden_indices]
        return self.layers[-1].finish(attention_out, None, residual, batch.only_hidden(), self.norm)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [num_rows, vocab_size] fp32 of hidden [num_rows, hidden_size]; in `out` if given."""
        # Takes no batch: the rows may be any slice of a step's hidden states.
        logits = self.output.weights.matmul(hidden)
        scale, softcap = self.spec.logits_scale, self.spec.logits_softcap
        if scale != 1.0 or softcap:
            if out is None:
                out = torch.empty_like(logits, dtype=torch.float32)
            return scaled_logits(logits, scale, softcap, out)
        return logits.float() if out is None else out.copy_(logits)
