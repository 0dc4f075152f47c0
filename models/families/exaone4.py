"""EXAONE 4: norms on outputs and on each head of q and k; a full layer beside windows has no positions."""

from typing import Any

from models.families import llama_like
from models.families.llama_like import read_spec, with_layer_types, without_rope_in_full_layers
from models.spec import DecoderSpec

WEIGHT_MAP = llama_like.WEIGHT_MAP | {
    "model.layers.*.self_attn.q_norm": "layers.*.attention.q_norm",
    "model.layers.*.self_attn.k_norm": "layers.*.attention.k_norm",
    "model.layers.*.post_attention_layernorm": "layers.*.attention_output_norm",
    "model.layers.*.post_feedforward_layernorm": "layers.*.mlp_output_norm",
}


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read an Exaone4Config as in config.json."""
    config = {"sliding_window": 4096, "rms_norm_eps": 1e-5, **config}
    if config["sliding_window"] is None:
        return read_spec(config, qk_norm="rms", norms="after")
    spec = read_spec(with_layer_types(config, 4), qk_norm="rms", norms="after")
    return without_rope_in_full_layers(spec)
