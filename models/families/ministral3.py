"""Ministral 3: Llama's layers, with queries that grow with their position."""

from typing import Any

from models.families.llama_like import WEIGHT_MAP, read_spec
from models.spec import DecoderSpec

__all__ = ["WEIGHT_MAP", "spec"]


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a Ministral3Config as in config.json."""
    defaults = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
    }
    return read_spec({**defaults, **config})
