"""Phi-3, Phi-3.5 and Phi-4: packed projections; the mini models rotate a part of each head (Phi-4-mini)."""

from typing import Any

from models.config_values import mapping
from models.families import llama_like
from models.families.llama_like import read_spec, refuse
from models.spec import DecoderSpec
from models.weight_names import Packed

WEIGHT_MAP = llama_like.WEIGHT_MAP | {
    "model.layers.*.self_attn.qkv_proj": Packed(
        (
            "layers.*.attention.qkv.q",
            "layers.*.attention.qkv.k",
            "layers.*.attention.qkv.v",
        )
    ),
    "model.layers.*.mlp.gate_up_proj": Packed(("layers.*.mlp.gate_up.gate", "layers.*.mlp.gate_up.up")),
}


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a Phi3Config as in config.json."""
    refuse(config, "attention_bias", "mlp_bias", "lm_head_bias")
    defaults = {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    }
    rope = mapping(config, "rope_parameters") or mapping(config, "rope_scaling")
    if (rope.get("rope_type") or rope.get("type")) == "yarn":  # what some of the first releases call it
        rope = {**rope, "rope_type": "longrope"}
    return read_spec({**defaults, **config, "rope_parameters": rope})
