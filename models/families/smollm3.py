"""SmolLM3: Llama's layers, every fourth without positions."""

from dataclasses import replace
from typing import Any

from models.config_values import count, flag
from models.errors import ModelError
from models.families.llama_like import WEIGHT_MAP, read_spec
from models.spec import DecoderSpec

__all__ = ["WEIGHT_MAP", "spec"]


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a SmolLM3Config as in config.json. Its `no_rope_layers` has a 1 for each layer with positions."""
    num_layers, interval = count(config, "num_hidden_layers"), count(config, "no_rope_layer_interval", 4)
    has_rope = config.get("no_rope_layers") or [(layer + 1) % interval for layer in range(num_layers)]
    if not isinstance(has_rope, list) or len(has_rope) != num_layers:
        raise ModelError(f"no_rope_layers is {has_rope!r:.99}, which is not a list of {num_layers} numbers")
    windowed = flag(config, "use_sliding_window") and config.get("sliding_window")
    types = ["sliding_attention" if windowed and not rope else "full_attention" for rope in has_rope]
    defaults = {
        "num_key_value_heads": 4,
        "layer_types": types,
        "max_position_embeddings": 32_768,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    }
    bias = flag(config, "attention_bias")
    spec = read_spec({**defaults, **config}, qkv_bias=bias, output_bias=bias)
    return spec.with_attention(
        lambda layer, attention: attention if has_rope[layer] else replace(attention, rope=None)
    )
