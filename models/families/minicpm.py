"""MiniCPM: Llama's layers with multipliers of embeddings, residual additions and logits (Hu et al., 2024)."""

from dataclasses import replace
from typing import Any

from models.config_values import flag, number
from models.families.llama_like import WEIGHT_MAP, read_spec, refuse
from models.spec import DecoderSpec

__all__ = ["WEIGHT_MAP", "spec"]


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a MiniCPMConfig as in config.json. Models with experts or sparse attention are refused."""
    refuse(config, "num_experts", "sparse_config")
    bias = flag(config, "attention_bias")
    spec = read_spec({"tie_word_embeddings": True, **config}, qkv_bias=bias, output_bias=bias)
    return replace(
        spec,
        embedding_scale=number(config, "scale_emb", 1.0),
        residual_multiplier=number(config, "scale_depth", 1.0) / spec.num_layers**0.5,
        logits_scale=number(config, "dim_model_base", 1.0) / spec.hidden_size,
    )
