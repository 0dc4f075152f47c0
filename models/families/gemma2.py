"""Gemma 2: norms on inputs and outputs, soft caps, and a window in every second layer."""

from typing import Any

from models.config_values import number, positive
from models.families import llama_like
from models.families.gemma import read_gemma_spec
from models.families.llama_like import with_layer_types
from models.spec import DecoderSpec

WEIGHT_MAP = llama_like.WEIGHT_MAP | {
    "model.layers.*.post_attention_layernorm": "layers.*.attention_output_norm",
    "model.layers.*.pre_feedforward_layernorm": "layers.*.mlp_norm",
    "model.layers.*.post_feedforward_layernorm": "layers.*.mlp_output_norm",
}


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a Gemma2Config as in config.json."""
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # null: none
    config = {"sliding_window": 4096, **caps, **config}
    return read_gemma_spec(
        with_layer_types(config, 2),
        scale=positive(config, "query_pre_attn_scalar", 256) ** -0.5,
        softcap=number(config, "attn_logit_softcapping", 0.0),
        norms="both",
    )
