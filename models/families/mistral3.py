"""Mistral Small 3.1 and later, and Ministral 3 with images: the text model. Images are not read."""

from typing import Any

from models.config_values import mapping
from models.families import llama, ministral3
from models.families.llama_like import beside_images
from models.spec import DecoderSpec

WEIGHT_MAP = beside_images(llama.WEIGHT_MAP)


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a Mistral3Config as in config.json."""
    text = {"tie_word_embeddings": config.get("tie_word_embeddings"), **mapping(config, "text_config")}
    return ministral3.spec(text) if text.get("model_type") == "ministral3" else llama.spec(text)
