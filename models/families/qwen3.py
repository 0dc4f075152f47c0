"""Qwen3: Llama's layers with a norm on each head of q and k."""

from typing import Any

from models.config_values import flag
from models.families import llama_like
from models.families.llama_like import read_spec, with_qwen_windows
from models.spec import DecoderSpec

WEIGHT_MAP = llama_like.WEIGHT_MAP | {
    "model.layers.*.self_attn.q_norm": "layers.*.attention.q_norm",
    "model.layers.*.self_attn.k_norm": "layers.*.attention.k_norm",
}


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a Qwen3Config as in config.json."""
    bias = flag(config, "attention_bias")
    config = with_qwen_windows({"head_dim": 128, **config})
    return read_spec(config, qkv_bias=bias, output_bias=bias, qk_norm="rms")
