"""OLMo 2: norms on outputs, and RMSNorm over all heads of q and of k."""

from typing import Any

from models.config_values import flag, number
from models.families import llama_like
from models.families.llama_like import read_spec
from models.spec import DecoderSpec, NormSpec

WEIGHT_MAP = llama_like.WEIGHT_MAP | {
    "model.layers.*.self_attn.q_norm": "layers.*.attention.q_norm",
    "model.layers.*.self_attn.k_norm": "layers.*.attention.k_norm",
    "model.layers.*.post_attention_layernorm": "layers.*.attention_output_norm",
    "model.layers.*.post_feedforward_layernorm": "layers.*.mlp_output_norm",
}


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read an Olmo2Config as in config.json."""
    bias = flag(config, "attention_bias")
    return read_spec(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="rms_of_projection",
        norm=NormSpec(number(config, "rms_norm_eps", 1e-5), fp32_weight=True),
        norms="after",
    )
