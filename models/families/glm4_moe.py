"""GLM-4.5 and 4.6: dense layers, then experts chosen by sigmoids with a bias, and one that all tokens use."""

from dataclasses import replace
from typing import Any

from models.config_values import count, flag
from models.families import llama_like
from models.families.llama_like import read_spec
from models.families.moe_like import EXPERT_MAP, read_experts, sigmoid_router, with_experts
from models.spec import DecoderSpec

WEIGHT_MAP = (
    llama_like.WEIGHT_MAP
    | EXPERT_MAP
    | {
        "model.layers.*.self_attn.q_norm": "layers.*.attention.q_norm",
        "model.layers.*.self_attn.k_norm": "layers.*.attention.k_norm",
        "model.layers.*.mlp.gate.e_score_correction_bias": "layers.*.mlp.router.correction_bias",
        "model.layers.*.mlp.shared_experts.gate_proj": "layers.*.mlp.shared.gate_up.gate",
        "model.layers.*.mlp.shared_experts.up_proj": "layers.*.mlp.shared.gate_up.up",
        "model.layers.*.mlp.shared_experts.down_proj": "layers.*.mlp.shared.down",
    }
)


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a Glm4MoeConfig as in config.json."""
    defaults = {"rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "partial_rotary_factor": 0.5}
    dense = read_spec(
        {**defaults, **config},
        qkv_bias=flag(config, "attention_bias"),
        qk_norm="rms" if flag(config, "use_qk_norm") else None,
    )
    top_k = count(config, "num_experts_per_tok", 8)
    router = sigmoid_router(config, top_k, normalize=flag(config, "norm_topk_prob", default=True))
    shared_size = count(config, "moe_intermediate_size") * count(config, "n_shared_experts", 1)
    experts = read_experts(dense, config, router, shared_size, correction_bias=True)
    spec = with_experts(dense, experts, range(count(config, "first_k_dense_replace", 1)))
    return replace(spec, num_mtp_layers=count(config, "num_nextn_predict_layers", 1))
