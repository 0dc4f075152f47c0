"""OLMoE: experts, and RMSNorm over all heads of q and of k (Muennighoff et al., 2024)."""

from dataclasses import replace
from typing import Any

from kernels.expert_routing import RouterOptions
from models.config_values import count, flag, number
from models.families import llama_like
from models.families.llama_like import read_spec
from models.families.moe_like import EXPERT_MAP, read_experts, with_experts
from models.spec import DecoderSpec

WEIGHT_MAP = (
    llama_like.WEIGHT_MAP
    | EXPERT_MAP
    | {
        "model.layers.*.self_attn.q_norm": "layers.*.attention.q_norm",
        "model.layers.*.self_attn.k_norm": "layers.*.attention.k_norm",
    }
)


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read an OlmoeConfig as in config.json."""
    bias = flag(config, "attention_bias")
    dense = read_spec(
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, **config},
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="rms_of_projection",
    )
    clip = number(config, "clip_qkv", 0.0)
    dense = dense.with_attention(lambda _layer, attention: replace(attention, clip_qkv=clip))
    router = RouterOptions(count(config, "num_experts_per_tok", 8), normalize=flag(config, "norm_topk_prob"))
    return with_experts(dense, read_experts(dense, config, router))
