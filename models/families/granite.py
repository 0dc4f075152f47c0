"""Granite: Llama's layers with multipliers of embeddings, attention scores, residual additions and logits."""

from dataclasses import replace
from typing import Any

from models.config_values import flag, number, positive
from models.families.llama_like import WEIGHT_MAP, read_spec
from models.spec import DecoderSpec

__all__ = ["WEIGHT_MAP", "spec"]


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a GraniteConfig as in config.json."""
    bias = flag(config, "attention_bias")
    scale = number(config, "attention_multiplier", 1.0)
    return replace(
        read_spec(config, qkv_bias=bias, output_bias=bias, scale=scale),
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        residual_multiplier=number(config, "residual_multiplier", 1.0),
        logits_scale=1.0 / positive(config, "logits_scaling", 1.0),
    )
