"""Seed-OSS: Llama's layers with biases on q, k and v."""

from typing import Any

from models.families.llama_like import WEIGHT_MAP, read_spec
from models.spec import DecoderSpec

__all__ = ["WEIGHT_MAP", "spec"]


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a SeedOssConfig as in config.json."""
    defaults = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524_288}
    return read_spec(
        {**defaults, **config},
        qkv_bias=bool(config.get("attention_bias", True)),
        output_bias=bool(config.get("attention_out_bias", False)),
    )
