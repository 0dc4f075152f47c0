"""OLMo 3: OLMo 2 with a window in three layers of four, whose positions are not scaled."""

from typing import Any

from models.config_values import positive
from models.families import olmo2
from models.families.llama_like import with_layer_types, with_rope_by_layer_type
from models.spec import DecoderSpec

WEIGHT_MAP = olmo2.WEIGHT_MAP


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read an Olmo3Config as in config.json."""
    theta = positive(config, "rope_theta", 500_000.0)
    config = with_rope_by_layer_type({"sliding_window": 4096, **config}, theta, theta)
    return olmo2.spec(with_layer_types(config, 4))
