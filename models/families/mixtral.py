"""Mixtral: Mistral's layers with experts (Jiang et al., 2024)."""

from typing import Any

from kernels.expert_routing import RouterOptions
from models.config_values import count
from models.families import llama_like
from models.families.llama_like import read_spec
from models.families.moe_like import EXPERT_MAP, read_experts, with_experts
from models.spec import DecoderSpec

WEIGHT_MAP = (
    llama_like.WEIGHT_MAP
    | EXPERT_MAP
    | {
        "model.layers.*.block_sparse_moe.gate": "layers.*.mlp.router",
        "model.layers.*.block_sparse_moe.experts.*.w1": "layers.*.mlp.gate_up.*.gate",
        "model.layers.*.block_sparse_moe.experts.*.w3": "layers.*.mlp.gate_up.*.up",
        "model.layers.*.block_sparse_moe.experts.*.w2": "layers.*.mlp.down.*",
    }
)


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a MixtralConfig as in config.json."""
    dense = read_spec(config)
    router = RouterOptions(count(config, "num_experts_per_tok", 2), normalize=True)
    return with_experts(dense, read_experts(dense, config, router))
