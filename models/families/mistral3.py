"""Mistral Small 3.1 and later, and Ministral 3 with images: the text model. Images are not read."""

from typing import Any

from models.config_values import mapping
from models.families import llama, ministral3
from models.spec import DecoderSpec
from models.weight_names import Target

WEIGHT_MAP: dict[str, Target] = {
    f"language_model.{name}": target for name, target in llama.WEIGHT_MAP.items()
} | {"vision_tower.**": None, "multi_modal_projector.**": None}


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a Mistral3Config as in config.json."""
    text = {"tie_word_embeddings": config.get("tie_word_embeddings"), **mapping(config, "text_config")}
    return ministral3.spec(text) if text.get("model_type") == "ministral3" else llama.spec(text)
