"""Seed-OSS: Llama's layers with biases on q, k and v."""

from typing import Any

from models.config_values import flag
from models.families.llama_like import WEIGHT_MAP, read_spec
from models.spec import DecoderSpec

__all__ = ["WEIGHT_MAP", "spec"]


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a SeedOssConfig as in config.json."""
    defaults = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524_288}
    return read_spec(
        {**defaults, **config},
        qkv_bias=flag(config, "attention_bias", default=True),
        output_bias=flag(config, "attention_out_bias"),
    )
