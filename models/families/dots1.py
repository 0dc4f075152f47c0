"""dots.llm1: Qwen3's attention; experts chosen by sigmoids with a bias, and one that all tokens use."""

from typing import Any

from kernels.expert_routing import RouterOptions
from models.config_values import count, flag, number
from models.families import glm4_moe
from models.families.llama_like import read_spec, refuse_unless, with_qwen_windows
from models.families.moe_like import read_experts, with_experts
from models.spec import DecoderSpec, MlpSpec

WEIGHT_MAP = glm4_moe.WEIGHT_MAP


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a Dots1Config as in config.json."""
    windows = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 62}
    bias = flag(config, "attention_bias")
    dense = read_spec(
        with_qwen_windows({**windows, **config}), qkv_bias=bias, output_bias=bias, qk_norm="rms"
    )
    for key in ("scoring_func", "topk_method"):  # not read by transformers
        refuse_unless(config, key, "sigmoid", "noaux_tc")
    router = RouterOptions(
        count(config, "num_experts_per_tok"),
        "sigmoid",
        normalize=flag(config, "norm_topk_prob"),
        scale=number(config, "routed_scaling_factor", 1.0),
        num_groups=count(config, "n_group", 1),
        top_groups=count(config, "topk_group", 1),
    )
    shared = MlpSpec(count(config, "moe_intermediate_size") * count(config, "n_shared_experts"))
    experts = read_experts(dense, config, router, correction_bias=True, shared=shared)
    return with_experts(dense, experts, range(count(config, "first_k_dense_replace", 0)))
