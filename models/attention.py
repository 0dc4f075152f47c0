"""Self-attention of a layer, with what surrounds it: projections, norms of q and k, rotary positions."""

import torch
from torch import Tensor

from kernels.kv_layer import KVLayer
from kernels.paged_attention import AttentionOptions, paged_attention
from kernels.rope_kv_write import QKNorm, rope_kv_write
from models.errors import ModelError
from models.formats.base import LinearShape, Shard
from models.forward_batch import ForwardBatch
from models.layers import Linear, Norm, NormMaker, OfHeads, Part
from models.rope import LongRopeScaling, RopeSpec, cos_sin_table
from models.spec import AttentionSpec


class Rotary:
    """Rotary position embedding: a table of cos and sin, shared by the layers with an equal RopeSpec."""

    def __init__(self, spec: RopeSpec, num_positions: int, device: torch.device) -> None:
        self.interleaved = spec.interleaved
        self.scales_queries = spec.query_scaling is not None
        self._cos_sin = cos_sin_table(spec, num_positions, device)
        self._query_scale: Tensor | None = None
        if spec.query_scaling is not None:
            self._query_scale = spec.query_scaling.table(num_positions, device)

    def angles(self, batch: ForwardBatch) -> Tensor:
        """Return cos and sin of each token's position, [num_tokens, 2, rotary_dim / 2] fp32.

        They are gathered once per step.
        """
        return batch.attention[0].once(self, lambda: self._cos_sin[batch.positions])

    def query_scale(self, batch: ForwardBatch) -> Tensor:
        """Return the factor on each token's queries, [num_tokens] fp32, gathered once per step."""
        table = self._query_scale
        assert table is not None
        return batch.attention[0].once((self, "query_scale"), lambda: table[batch.positions])


class LongRotary(Rotary):
    """The rotary embedding of LongRoPE (Ding et al., 2024): other angles for sequences over `short_context`.

    Their rows of the table follow those of short sequences.
    """

    def __init__(self, spec: RopeSpec, short_context: int, num_positions: int, device: torch.device) -> None:
        super().__init__(spec, num_positions, device)
        self._short_context = short_context
        self._cos_sin = torch.cat((cos_sin_table(spec, short_context, device), self._cos_sin))

    def angles(self, batch: ForwardBatch) -> Tensor:
        return batch.attention[0].once(self, lambda: self._cos_sin[self._rows(batch)])

    def _rows(self, batch: ForwardBatch) -> Tensor:
        """Return the row of the table of each token, int64 [num_tokens]."""
        if batch.is_long is None or batch.row_slots is None:
            return batch.positions
        ends = batch.attention[0].query_start[1:]
        tokens = torch.arange(len(batch.positions), dtype=ends.dtype, device=ends.device)
        rows = torch.searchsorted(ends, tokens, right=True).clamp_(max=len(batch.row_slots) - 1)
        return batch.positions + batch.is_long[batch.row_slots[rows]] * self._short_context


def make_rotary(
    spec: RopeSpec, short_context: int | None, num_positions: int, device: torch.device
) -> Rotary:
    """Return the rotary embedding of a spec for sequences of up to `num_positions` tokens."""
    if short_context is not None and isinstance(spec.scaling, LongRopeScaling):
        return LongRotary(spec, short_context, num_positions, device)
    return Rotary(spec, num_positions, device)


class Sinks(OfHeads):
    """A logit per query head that joins the softmax of its scores and has no value, fp32 [num_heads].

    Its parameter is named as in gpt-oss: `sinks`, without `.weight`.
    """

    def parameters(self) -> dict[str, tuple[int, ...]]:
        return {"sinks": self._shape}


class HeadNorm(OfHeads):
    """The weights of a LayerNorm of each head, [num_heads, head_dim]. `rope_kv_write` computes it.

    Those of one head are a parameter, `HEAD.weight` [head_dim].
    """

    def parameters(self) -> dict[str, tuple[int, ...]]:
        num_heads, head_dim = self._shape
        return {f"{head}.weight": (head_dim,) for head in range(num_heads)}

    def fill(self, name: str, tensor: Tensor) -> None:
        num_heads, head_dim = self._shape
        heads = range(num_heads)[self._rows]
        if not hasattr(self, "weight"):
            self.weight = torch.empty(len(heads), head_dim, dtype=self._dtype, device=self._device)
        head = int(name.partition(".")[0])
        if head in heads:
            self.weight[head - heads.start].copy_(tensor)

    def random(self, name: str, generator: torch.Generator) -> Tensor:
        return torch.ones(self._shape[1], dtype=self._dtype, device=generator.device)


class Attention(Part):
    """Grouped-query self-attention over pages, with rotary positions: attend(), then `output`."""

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        rotary: Rotary | None,
        shard: Shard,
        norm: NormMaker,
        kv_group: int,
    ) -> None:
        if spec.num_kv_heads % shard.world:
            raise ModelError(
                f"{spec.num_kv_heads} key/value heads cannot be divided among {shard.world} ranks"
            )
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        outputs = {"q": queries, "k": keys, "v": keys}
        self.qkv = Linear(LinearShape(hidden_size, outputs, spec.qkv_bias, shard="column"))
        self.output = Linear(LinearShape(queries, {"": hidden_size}, spec.output_bias, shard="row"))
        self._qk_norm = spec.qk_norm
        if spec.qk_norm is not None:
            self.q_norm = self._make_norm(spec, spec.num_heads, norm, shard)
            self.k_norm = self._make_norm(spec, spec.num_kv_heads, norm, shard)
            self._norm_eps = norm.spec.eps
        self._clip = spec.clip_qkv
        self.sinks = Sinks((spec.num_heads,), torch.float32, norm.device, shard) if spec.sinks else None
        self._rotary = rotary
        self._interleaved = rotary is not None and rotary.interleaved
        self._head_dim = spec.head_dim
        num_kv_heads = spec.num_kv_heads // shard.world
        self._heads = (spec.num_heads // shard.world, num_kv_heads, num_kv_heads)
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        # Compiled kernels take floats from registers of their own: an int would be another number to them.
        self._options = AttentionOptions(float(scale), spec.window, float(spec.softcap))
        self._kv_group = kv_group

    @staticmethod
    def _make_norm(spec: AttentionSpec, num_heads: int, norm: NormMaker, shard: Shard) -> Norm | HeadNorm:
        if spec.qk_norm == "layer_norm_per_head":
            return HeadNorm((num_heads, spec.head_dim), norm.dtype, norm.device, shard)
        assert norm.spec.kind == "rms"
        if spec.qk_norm == "rms":
            return norm(spec.head_dim)
        if shard.world > 1:
            raise ModelError("a norm over all heads of q or k cannot be divided among ranks")
        return norm(num_heads * spec.head_dim)

    def attend(self, hidden: Tensor, batch: ForwardBatch, kv: KVLayer, out: Tensor | None = None) -> Tensor:
        """Write keys and values of hidden [num_tokens, hidden_size] to `kv` and attend to its pages.

        Returns [num_tokens, num_heads * head_dim], before the output projection; in `out` if it is given.
        """
        heads = self.qkv(hidden, batch).view(hidden.shape[0], -1, self._head_dim)
        q, k, v = torch.split_with_sizes(heads, self._heads, dim=1)
        norm, options = None, self._options
        if self._qk_norm == "rms_of_projection":
            assert isinstance(self.q_norm, Norm) and isinstance(self.k_norm, Norm)
            q = self.q_norm(q.flatten(1)).view(q.shape)
            k = self.k_norm(k.flatten(1)).view(k.shape)
        elif self._qk_norm is not None:
            is_layer_norm = self._qk_norm == "layer_norm_per_head"
            norm = QKNorm(self.q_norm.weight, self.k_norm.weight, self._norm_eps, is_layer_norm)
        if self._clip:
            for x in (q, k, v):
                x.clamp_(-self._clip, self._clip)
        if self.sinks is not None:
            options = options._replace(sinks=self.sinks.weight)
        angles = q_scale = None
        if self._rotary is not None:
            angles = self._rotary.angles(batch)
            if self._rotary.scales_queries:
                q_scale = self._rotary.query_scale(batch)
        attention = batch.attention[self._kv_group]
        rope_kv_write(q, k, v, angles, kv, attention.slot_mapping, norm, self._interleaved, q_scale)
        if out is not None:
            out = out.view(q.shape)
        attended = paged_attention(q, kv, attention, options, out)
        return attended.view(q.shape[0], -1)
