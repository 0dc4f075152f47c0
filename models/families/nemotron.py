"""Nemotron-4 and Minitron: LayerNorm times 1 + weight, squared ReLU without gate, half of a head rotated."""

from typing import Any

from models.config_values import flag, number
from models.families import llama_like
from models.families.llama_like import read_spec
from models.spec import DecoderSpec, NormSpec

WEIGHT_MAP = llama_like.WEIGHT_MAP | {"model.layers.*.mlp.up_proj": "layers.*.mlp.up"}


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a NemotronConfig as in config.json."""
    bias = flag(config, "attention_bias")
    defaults = {"hidden_act": "relu2", "max_position_embeddings": 4096, "partial_rotary_factor": 0.5}
    return read_spec(
        {**defaults, **config},
        qkv_bias=bias,
        output_bias=bias,
        norm=NormSpec(number(config, "norm_eps", 1e-5), "layer", offset=1.0, bias=True),
        gated=False,
    )
