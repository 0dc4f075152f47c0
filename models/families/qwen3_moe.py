"""Qwen3-MoE: Qwen3's layers with experts."""

from typing import Any

from kernels.expert_routing import RouterOptions
from models.config_values import count, flag
from models.families import qwen3
from models.families.llama_like import read_spec
from models.families.moe_like import EXPERT_MAP, qwen_dense_layers, read_experts, with_experts
from models.spec import DecoderSpec

WEIGHT_MAP = qwen3.WEIGHT_MAP | EXPERT_MAP


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a Qwen3MoeConfig as in config.json."""
    bias = flag(config, "attention_bias")
    if not flag(config, "use_sliding_window"):
        config = {**config, "sliding_window": None}
    dense = read_spec(config, qkv_bias=bias, output_bias=bias, qk_norm="rms")
    router = RouterOptions(count(config, "num_experts_per_tok", 8), normalize=flag(config, "norm_topk_prob"))
    return with_experts(dense, read_experts(dense, config, router), qwen_dense_layers(config))
