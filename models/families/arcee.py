"""Arcee (AFM): Llama's layers with an MLP without gate, whose activation is the square of relu."""

from typing import Any

from models.config_values import flag
from models.families import llama_like
from models.families.llama_like import read_spec
from models.spec import DecoderSpec

WEIGHT_MAP = llama_like.WEIGHT_MAP | {"model.layers.*.mlp.up_proj": "layers.*.mlp.up"}


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read an ArceeConfig as in config.json."""
    bias = flag(config, "attention_bias")
    defaults = {"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
    return read_spec({**defaults, **config}, qkv_bias=bias, output_bias=bias, gated=False)
