"""Gemma 3, text: Gemma 2 with QK norm, windows in five layers of six, and a rotary base for either kind."""

from typing import Any

from models.families import gemma2
from models.families.gemma import read_gemma_spec
from models.families.llama_like import refuse, with_layer_types
from models.spec import DecoderSpec

WEIGHT_MAP = gemma2.WEIGHT_MAP | {
    "model.layers.*.self_attn.q_norm": "layers.*.attention.q_norm",
    "model.layers.*.self_attn.k_norm": "layers.*.attention.k_norm",
}


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a Gemma3TextConfig as in config.json."""
    refuse(config, "attn_logit_softcapping")
    config = {"sliding_window": 4096, "max_position_embeddings": 131_072, **config}
    return read_gemma_spec(
        _with_rope_parameters(with_layer_types(config, 6)),
        qk_norm="rms",
        scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        norms="both",
    )


def _with_rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with `rope_parameters` by type of layer.

    Older ones have `rope_theta` and `rope_scaling` for full layers, `rope_local_base_freq` for the others.
    """
    given = config.get("rope_parameters") or {"full_attention": config.get("rope_scaling")}
    full = {"rope_theta": config.get("rope_theta", 1_000_000.0), **(given.get("full_attention") or {})}
    local = config.get("rope_local_base_freq", 10_000.0)
    sliding = {"rope_theta": local, **(given.get("sliding_attention") or {})}
    return {**config, "rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
