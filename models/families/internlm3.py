"""InternLM3: Llama's layers with names of its own for the biases."""

from typing import Any

from models.config_values import flag
from models.families.llama_like import WEIGHT_MAP, read_spec
from models.spec import DecoderSpec

__all__ = ["WEIGHT_MAP", "spec"]


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read an InternLM3Config as in config.json."""
    bias = flag(config, "bias")
    defaults = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32_768,
    }
    qkv_bias = flag(config, "qkv_bias")
    return read_spec({**defaults, **config, "mlp_bias": bias}, qkv_bias=qkv_bias, output_bias=bias)
