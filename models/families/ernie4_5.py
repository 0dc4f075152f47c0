"""ERNIE 4.5, dense: Llama's layers with interleaved rotary pairs."""

from typing import Any

from models.config_values import flag
from models.families.llama_like import WEIGHT_MAP, read_spec
from models.spec import DecoderSpec

__all__ = ["WEIGHT_MAP", "spec"]


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read an Ernie4_5Config as in config.json."""
    bias = flag(config, "use_bias")
    defaults = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    }
    return read_spec(
        {**defaults, **config, "mlp_bias": bias}, qkv_bias=bias, output_bias=bias, interleaved=True
    )
