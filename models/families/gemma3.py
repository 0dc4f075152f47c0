"""Gemma 3, text: Gemma 2 with QK norm, windows in five layers of six, and a rotary base for either kind."""

from typing import Any

from models.config_values import positive
from models.families import gemma2
from models.families.gemma import read_gemma_spec
from models.families.llama_like import refuse, with_layer_types, with_rope_by_layer_type
from models.spec import DecoderSpec

WEIGHT_MAP = gemma2.WEIGHT_MAP | {
    "model.layers.*.self_attn.q_norm": "layers.*.attention.q_norm",
    "model.layers.*.self_attn.k_norm": "layers.*.attention.k_norm",
}


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a Gemma3TextConfig as in config.json."""
    refuse(config, "attn_logit_softcapping")
    config = {"sliding_window": 4096, "max_position_embeddings": 131_072, **config}
    full, sliding = positive(config, "rope_theta", 1e6), positive(config, "rope_local_base_freq", 1e4)
    return read_gemma_spec(
        with_layer_types(with_rope_by_layer_type(config, full, sliding), 6),
        qk_norm="rms",
        scale=positive(config, "query_pre_attn_scalar", 256) ** -0.5,
        norms="both",
    )
