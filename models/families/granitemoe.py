"""Granite 3 with experts, and with an expert that all tokens use (granitemoeshared)."""

from typing import Any

from kernels.expert_routing import RouterOptions
from models.config_values import count
from models.families import granite
from models.families.moe_like import read_experts, with_experts
from models.spec import DecoderSpec
from models.weight_names import Packed, Stacked

_SHARED_HALVES = ("layers.*.mlp.shared.gate_up.gate", "layers.*.mlp.shared.gate_up.up")

WEIGHT_MAP = granite.WEIGHT_MAP | {
    "model.layers.*.block_sparse_moe.router.layer": "layers.*.mlp.router",
    "model.layers.*.block_sparse_moe.input_linear.weight": Stacked(
        ("layers.*.mlp.gate_up.*.gate.weight", "layers.*.mlp.gate_up.*.up.weight")
    ),
    "model.layers.*.block_sparse_moe.output_linear.weight": Stacked(("layers.*.mlp.down.*.weight",)),
    "model.layers.*.shared_mlp.input_linear": Packed(_SHARED_HALVES),
    "model.layers.*.shared_mlp.output_linear": "layers.*.mlp.shared.down",
}


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a GraniteMoeConfig or GraniteMoeSharedConfig as in config.json."""
    dense = granite.spec(config)
    router = RouterOptions(count(config, "num_experts_per_tok", 2), normalize=True)
    shared_size = count(config, "shared_intermediate_size", 0)
    return with_experts(dense, read_experts(dense, config, router, shared_size))
