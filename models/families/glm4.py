"""GLM-4: half of a head rotated in interleaved pairs; the 0414 models (Glm4) have norms on outputs, too."""

from typing import Any

from models.config_values import flag
from models.families import llama_like
from models.families.llama_like import read_spec
from models.spec import DecoderSpec
from models.weight_names import Packed

WEIGHT_MAP = llama_like.WEIGHT_MAP | {
    "model.layers.*.post_self_attn_layernorm": "layers.*.attention_output_norm",
    "model.layers.*.post_mlp_layernorm": "layers.*.mlp_output_norm",
    "model.layers.*.mlp.gate_up_proj": Packed(("layers.*.mlp.gate_up.gate", "layers.*.mlp.gate_up.up")),
}


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a GlmConfig or Glm4Config as in config.json."""
    defaults = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "max_position_embeddings": 131_072,
        "partial_rotary_factor": 0.5,
    }
    return read_spec(
        {**defaults, **config},
        qkv_bias=flag(config, "attention_bias", default=True),
        interleaved=True,
        norms="both" if "Glm4ForCausalLM" in config["architectures"] else "before",
    )
