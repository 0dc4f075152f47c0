"""Command R: attention and MLP side by side, LayerNorm, interleaved rotary pairs, scaled logits."""

from dataclasses import replace
from typing import Any

from models.families import llama_like
from models.families.llama_like import read_spec, refuse
from models.spec import DecoderSpec, NormSpec

WEIGHT_MAP = {
    name: target
    for name, target in llama_like.WEIGHT_MAP.items()
    if name != "model.layers.*.post_attention_layernorm"
}


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a CohereConfig as in config.json."""
    refuse(config, "use_qk_norm")
    return read_cohere_spec({"rope_theta": 500_000.0, **config})


def read_cohere_spec(config: dict[str, Any]) -> DecoderSpec:
    """Read what the configurations of Command R and Command A have in common."""
    bias = bool(config.get("attention_bias", False))
    spec = read_spec(
        {"max_position_embeddings": 8192, "tie_word_embeddings": True, **config},
        qkv_bias=bias,
        output_bias=bias,
        interleaved=True,
        norm=NormSpec(float(config.get("layer_norm_eps", 1e-5)), "layer"),
        norms="parallel",
    )
    return replace(spec, logits_scale=float(config.get("logit_scale", 0.0625)))
