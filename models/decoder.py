"""The decoder-only transformer that a DecoderSpec describes."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.kv_layer import KVLayer
from models.formats.base import WHOLE, LinearShape, MakeLinear, Shard
from models.forward_batch import ForwardBatch
from models.layers import Attention, Embedding, Leaf, Linear, Mlp, Norm, NormMaker, Part, Rotary, ScoreHead
from models.spec import DecoderSpec, LayerSpec


class DecoderLayer(Part):
    """Attention and MLP, each after its norm."""

    def __init__(
        self,
        layer: LayerSpec,
        spec: DecoderSpec,
        rotary: Rotary | None,
        shard: Shard,
        norm: NormMaker,
        kv_group: int,
    ) -> None:
        size = spec.hidden_size
        self.attention_norm = norm(size)
        self.attention = Attention(layer.attention, size, rotary, shard, norm, kv_group)
        self.mlp_norm = norm(size)
        self.mlp = Mlp(layer.mlp, size)


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
        self.embedding = Embedding((spec.vocab_size, spec.hidden_size), dtype, device)
        # One table for all layers with equal specs: its rows are gathered once a step.
        rotaries = {
            rope: None if rope is None else Rotary(rope, spec.max_position, device)
            for rope in {layer.attention.rope for layer in spec.layers}
        }
        norm = partial(Norm, eps=spec.norm_eps, dtype=dtype, device=device)
        self.layers = [
            DecoderLayer(layer, spec, rotaries[layer.attention.rope], shard, norm, kv_group)
            for layer, (kv_group, _) in zip(spec.layers, spec.kv_places, strict=True)
        ]
        self.norm = norm(spec.hidden_size)
        if spec.num_labels:
            self.score = ScoreHead(spec.num_labels, spec.hidden_size, device)
        else:
            self.output = Linear(LinearShape(spec.hidden_size, {"": spec.vocab_size}, shard="column"))
        # The norm before the next block is fused with the residual addition after this one.
        self._next_norms = [*(layer.attention_norm for layer in self.layers[1:]), self.norm]
        for address, leaf in self.leaves():
            if isinstance(leaf, Linear):
                leaf.weights = make_linear(address, leaf.shape)

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
        table = self.embedding.weight
        if self.spec.tie_embeddings and not self.output.weights.share(table):
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
        for index, (layer, kv_layer) in enumerate(zip(self.layers, kv, strict=True)):
            attended = layer.attention.attend(hidden, batch, kv_layer, out=attention_out)
            if index < len(self.layers) - 1:
                hidden = self._finish_layer(index, attended, residual, batch)
        return attended, residual

    def tail(self, attention_out: Tensor, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute the last output projection, MLP and final norm, for the tokens at hidden_indices only."""
        if batch.hidden_indices is not None:
            attention_out, residual = attention_out[batch.hidden_indices], residual[batch.hidden_indices]
        return self._finish_layer(len(self.layers) - 1, attention_out, residual, batch.only_hidden())

    def _finish_layer(self, index: int, attended: Tensor, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute a layer from its output projection on, and the norm that follows the layer."""
        layer = self.layers[index]
        hidden = layer.mlp_norm.add(layer.attention.output(attended, batch), residual)
        return self._next_norms[index].add(layer.mlp(hidden, batch), residual)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [num_rows, vocab_size] fp32 of hidden [num_rows, hidden_size]; in `out` if given."""
        # Takes no batch: the rows may be any slice of a step's hidden states.
        logits = self.output.weights.matmul(hidden)
        return logits.float() if out is None else out.copy_(logits)
