"""StableLM: Llama's layers with LayerNorm and a quarter of a head rotated; the larger ones in parallel."""

from typing import Any

from models.families.llama_like import WEIGHT_MAP, read_spec, refuse
from models.spec import DecoderSpec, NormSpec

__all__ = ["WEIGHT_MAP", "spec"]


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a StableLmConfig as in config.json."""
    refuse(config, "qk_layernorm")
    return read_spec(
        {"partial_rotary_factor": 0.25, "max_position_embeddings": 4096, **config},
        qkv_bias=bool(config.get("use_qkv_bias", False)),
        norm=NormSpec(float(config.get("layer_norm_eps", 1e-5)), "layer", bias=True),
        norms="parallel" if config.get("use_parallel_residual") else "before",
    )
