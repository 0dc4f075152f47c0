"""Qwen2-MoE and Qwen1.5-MoE: Qwen2's layers with experts, one of which all tokens use through a gate."""

from typing import Any

from kernels.expert_routing import RouterOptions
from models.config_values import count, flag
from models.families import llama_like
from models.families.llama_like import read_spec
from models.families.moe_like import EXPERT_MAP, qwen_dense_layers, read_experts, with_experts
from models.spec import DecoderSpec

WEIGHT_MAP = (
    llama_like.WEIGHT_MAP
    | EXPERT_MAP
    | {
        "model.layers.*.mlp.shared_expert.gate_proj": "layers.*.mlp.shared.gate_up.gate",
        "model.layers.*.mlp.shared_expert.up_proj": "layers.*.mlp.shared.gate_up.up",
        "model.layers.*.mlp.shared_expert.down_proj": "layers.*.mlp.shared.down",
        "model.layers.*.mlp.shared_expert_gate.weight": "layers.*.mlp.router.shared_gate",
    }
)


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a Qwen2MoeConfig as in config.json."""
    dense = read_spec(_with_windows(config), qkv_bias=flag(config, "qkv_bias", default=True))
    router = RouterOptions(count(config, "num_experts_per_tok", 4), normalize=flag(config, "norm_topk_prob"))
    shared_size = count(config, "shared_expert_intermediate_size")
    experts = read_experts(dense, config, router, shared_size, shared_gate=True)
    return with_experts(dense, experts, qwen_dense_layers(config))


def _with_windows(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with `layer_types`: every other layer below max_window_layers has a window."""
    num_layers = count(config, "num_hidden_layers")
    last = count(config, "max_window_layers", 28) if flag(config, "use_sliding_window") else 0
    types = [
        "sliding_attention" if index < last and index % 2 == 0 else "full_attention"
        for index in range(num_layers)
    ]
    return {**config, "layer_types": config.get("layer_types") or types}
