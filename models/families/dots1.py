"""dots.llm1: Qwen3's attention; experts chosen by sigmoids with a bias, and one that all tokens use."""

from typing import Any

from models.config_values import count, flag
from models.families import glm4_moe
from models.families.llama_like import read_spec, with_qwen_windows
from models.families.moe_like import read_experts, sigmoid_router, with_experts
from models.spec import DecoderSpec

WEIGHT_MAP = glm4_moe.WEIGHT_MAP


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a Dots1Config as in config.json."""
    windows = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 62}
    bias = flag(config, "attention_bias")
    dense = read_spec(
        with_qwen_windows({**windows, **config}), qkv_bias=bias, output_bias=bias, qk_norm="rms"
    )
    top_k = count(config, "num_experts_per_tok")
    router = sigmoid_router(config, top_k, normalize=flag(config, "norm_topk_prob"))
    shared_size = count(config, "moe_intermediate_size") * count(config, "n_shared_experts")
    experts = read_experts(dense, config, router, shared_size, correction_bias=True)
    return with_experts(dense, experts, range(count(config, "first_k_dense_replace", 0)))
