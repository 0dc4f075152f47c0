"""Phi-1 to Phi-2: attention and MLP side by side, LayerNorm, no gate, half of a head rotated, biases."""

from dataclasses import replace
from typing import Any

from models.config_values import number
from models.families import llama_like
from models.families.llama_like import read_spec, refuse
from models.spec import DecoderSpec, NormSpec

WEIGHT_MAP = llama_like.WEIGHT_MAP | {
    "model.layers.*.self_attn.dense": "layers.*.attention.output",
    "model.layers.*.mlp.fc1": "layers.*.mlp.up",
    "model.layers.*.mlp.fc2": "layers.*.mlp.down",
    "model.final_layernorm": "norm",
}


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a PhiConfig as in config.json."""
    refuse(config, "qk_layernorm")
    spec = read_spec(
        {"partial_rotary_factor": 0.5, "hidden_act": "gelu_new", **config, "mlp_bias": True},
        qkv_bias=True,
        output_bias=True,
        norm=NormSpec(number(config, "layer_norm_eps", 1e-5), "layer", bias=True),
        norms="parallel",
        gated=False,
    )
    return replace(spec, head_bias=True)
