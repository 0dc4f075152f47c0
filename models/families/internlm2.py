"""InternLM2 and 2.5: Llama's layers under other names, with q, k and v in one tensor, grouped by head."""

from typing import Any

import torch
from torch import Tensor

from models.config_values import flag
from models.families.llama_like import read_spec
from models.spec import DecoderSpec
from models.weight_names import Packed, Target


def _queries_first(tensor: Tensor, spec: DecoderSpec) -> Tensor:
    """Bring the rows of all q first: the tensor has q, k and v of each key/value head together."""
    heads = tensor.view(spec.num_kv_heads, -1, spec.head_dim, *tensor.shape[1:])
    parts = heads[:, :-2], heads[:, -2:-1], heads[:, -1:]
    return torch.cat([part.flatten(0, 2) for part in parts])


WEIGHT_MAP: dict[str, Target] = {
    "model.tok_embeddings": "embedding",
    "model.layers.*.attention_norm": "layers.*.attention_norm",
    "model.layers.*.attention.wqkv": Packed(
        ("layers.*.attention.qkv.q", "layers.*.attention.qkv.k", "layers.*.attention.qkv.v"), _queries_first
    ),
    "model.layers.*.attention.wo": "layers.*.attention.output",
    "model.layers.*.ffn_norm": "layers.*.mlp_norm",
    "model.layers.*.feed_forward.w1": "layers.*.mlp.gate_up.gate",
    "model.layers.*.feed_forward.w3": "layers.*.mlp.gate_up.up",
    "model.layers.*.feed_forward.w2": "layers.*.mlp.down",
    "model.norm": "norm",
    "output": "output",
}


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read an InternLM2Config as in config.json."""
    bias = flag(config, "bias", default=True)
    return read_spec(config, qkv_bias=bias, output_bias=bias)
