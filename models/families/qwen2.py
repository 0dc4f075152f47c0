"""Qwen2 and Qwen2.5: Llama's layers with biases on q, k and v alone."""

from typing import Any

from models.families.llama_like import WEIGHT_MAP, read_spec, with_qwen_windows
from models.spec import DecoderSpec

__all__ = ["WEIGHT_MAP", "spec"]


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a Qwen2Config as in config.json."""
    return read_spec(with_qwen_windows(config), qkv_bias=True)
