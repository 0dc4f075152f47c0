"""gpt-oss: attention sinks, every second layer with a window, clamped SwiGLU, biases everywhere."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels.expert_routing import RouterOptions
from kernels.grouped_linear import GatedActivation
from models.config_values import count, flag, number
from models.families import llama_like
from models.families.llama_like import read_spec
from models.families.moe_like import read_experts, with_experts
from models.spec import DecoderSpec, NormSpec
from models.weight_names import Stacked, Target


def _halves(rows: Tensor, _spec: DecoderSpec) -> Tensor:
    """Bring rows of gate and up, which alternate, into our order: all of gate, then all of up."""
    return torch.cat((rows[::2], rows[1::2]))


def _halves_of_columns(weight: Tensor, spec: DecoderSpec) -> Tensor:
    return _halves(weight.t(), spec)


def _transposed(weight: Tensor, _spec: DecoderSpec) -> Tensor:
    return weight.t()


def _gate_up(kind: str) -> tuple[str, str]:
    return f"layers.*.mlp.gate_up.*.gate.{kind}", f"layers.*.mlp.gate_up.*.up.{kind}"


_EXPERTS = "model.layers.*.mlp.experts"
_EXPERT_MAP: dict[str, Target] = {
    f"{_EXPERTS}.gate_up_proj": Stacked(_gate_up("weight"), _halves_of_columns),
    f"{_EXPERTS}.gate_up_proj_bias": Stacked(_gate_up("bias"), _halves),
    f"{_EXPERTS}.gate_up_proj_blocks": Stacked(_gate_up("blocks"), _halves),
    f"{_EXPERTS}.gate_up_proj_scales": Stacked(_gate_up("scales"), _halves),
    f"{_EXPERTS}.down_proj": Stacked(("layers.*.mlp.down.*.weight",), _transposed),
    f"{_EXPERTS}.down_proj_bias": Stacked(("layers.*.mlp.down.*.bias",)),
    f"{_EXPERTS}.down_proj_blocks": Stacked(("layers.*.mlp.down.*.blocks",)),
    f"{_EXPERTS}.down_proj_scales": Stacked(("layers.*.mlp.down.*.scales",)),
}
WEIGHT_MAP = (
    llama_like.WEIGHT_MAP
    | _EXPERT_MAP
    | {
        "model.layers.*.mlp.router": "layers.*.mlp.router",
        "model.layers.*.self_attn.sinks": "layers.*.attention.sinks.sinks",
    }
)


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a GptOssConfig as in config.json."""
    num_layers = count(config, "num_hidden_layers")
    types = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    defaults = {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "layer_types": types,
        "max_position_embeddings": 131_072,
        "rope_theta": 150_000.0,
    }
    bias = flag(config, "attention_bias", default=True)
    norm = NormSpec(number(config, "rms_norm_eps", 1e-5), fp32_weight=True)
    dense = read_spec({**defaults, **config}, qkv_bias=bias, output_bias=bias, norm=norm)
    dense = dense.with_attention(lambda _layer, attention: replace(attention, sinks=True))
    activation = GatedActivation(
        "swiglu_clamped", number(config, "swiglu_alpha", 1.702), number(config, "swiglu_limit", 7.0)
    )
    # The softmax of the chosen logits.
    router = RouterOptions(count(config, "num_experts_per_tok", 4), normalize=True)
    experts = read_experts(dense, config, router, activation=activation, bias=True, router_bias=True)
    return with_experts(dense, experts)
