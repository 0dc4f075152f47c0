"""Gemma 3 with images, 4B and larger: its text model. Images are not read."""

from typing import Any

from models.config_values import mapping
from models.families import gemma3
from models.families.llama_like import beside_images
from models.spec import DecoderSpec

WEIGHT_MAP = beside_images(gemma3.WEIGHT_MAP)


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a Gemma3Config as in config.json."""
    # Published configurations leave these out.
    defaults = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4}
    return gemma3.spec({**defaults, **config, **mapping(config, "text_config")})
