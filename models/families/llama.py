"""Llama 1 to 3.x and models of the same architecture: SmolLM2, TinyLlama, Yi, Mistral."""

from typing import Any

from models.config_values import flag
from models.families.llama_like import WEIGHT_MAP, read_spec
from models.spec import DecoderSpec

__all__ = ["WEIGHT_MAP", "spec"]


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a LlamaConfig or MistralConfig as in config.json."""
    bias = flag(config, "attention_bias")
    return read_spec(config, qkv_bias=bias, output_bias=bias)
