"""dots.llm1: Qwen3's attention; experts chosen by sigmoids with a bias, and one that all tokens use."""

from typing import Any

from kernels.expert_routing import RouterOptions
from models.families import glm4_moe
from models.families.llama_like import count, read_spec, with_qwen_windows
from models.families.moe_like import read_experts, with_experts
from models.spec import DecoderSpec, MlpSpec

WEIGHT_MAP = glm4_moe.WEIGHT_MAP


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a Dots1Config as in config.json."""
    windows = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 62}
    bias = bool(config.get("attention_bias", False))
    dense = read_spec(
        with_qwen_windows({**windows, **config}), qkv_bias=bias, output_bias=bias, qk_norm="rms"
    )
    router = RouterOptions(
        int(config["num_experts_per_tok"]),
        "sigmoid",
        normalize=bool(config.get("norm_topk_prob", False)),
        scale=float(config.get("routed_scaling_factor", 1.0)),
        num_groups=int(config.get("n_group") or 1),
        top_groups=int(config.get("topk_group") or 1),
    )
    shared = MlpSpec(int(config["moe_intermediate_size"]) * int(config["n_shared_experts"]))
    experts = read_experts(dense, config, router, correction_bias=True, shared=shared)
    return with_experts(dense, experts, range(count(config, "first_k_dense_replace", 0)))
