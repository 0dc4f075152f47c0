"""StableLM: Llama's layers with LayerNorm and a quarter of a head rotated; the larger ones in parallel."""

from typing import Any

from models.config_values import flag, number
from models.families import llama_like
from models.families.llama_like import read_spec
from models.spec import DecoderSpec, NormSpec

WEIGHT_MAP = llama_like.WEIGHT_MAP | {
    "model.layers.*.self_attn.q_layernorm.norms.*": "layers.*.attention.q_norm.*",
    "model.layers.*.self_attn.k_layernorm.norms.*": "layers.*.attention.k_norm.*",
}


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a StableLmConfig as in config.json."""
    return read_spec(
        {"partial_rotary_factor": 0.25, "max_position_embeddings": 4096, **config},
        qkv_bias=flag(config, "use_qkv_bias"),
        qk_norm="layer_norm_per_head" if flag(config, "qk_layernorm") else None,
        norm=NormSpec(number(config, "layer_norm_eps", 1e-5), "layer", bias=True),
        norms="parallel" if flag(config, "use_parallel_residual") else "before",
    )
