"""Command R7B and Command A: Command R with a window in three layers of four, no rotary in the fourth."""

from typing import Any

from models.families.cohere import WEIGHT_MAP, read_cohere_spec
from models.families.llama_like import refuse, with_layer_types, without_rope_in_full_layers
from models.spec import DecoderSpec

__all__ = ["WEIGHT_MAP", "spec"]


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a Cohere2Config as in config.json."""
    refuse(config, "use_qk_norm")
    config = with_layer_types({"sliding_window": 4096, **config}, 4)
    return without_rope_in_full_layers(read_cohere_spec(config))
