"""StarCoder2: LayerNorm, an MLP without gate, biases everywhere, and a window in all layers."""

from typing import Any

from models.config_values import flag, number
from models.families import llama_like
from models.families.llama_like import read_spec
from models.spec import DecoderSpec, NormSpec

WEIGHT_MAP = llama_like.WEIGHT_MAP | {
    "model.layers.*.mlp.c_fc": "layers.*.mlp.up",
    "model.layers.*.mlp.c_proj": "layers.*.mlp.down",
}


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a Starcoder2Config as in config.json."""
    bias = flag(config, "use_bias", default=True)
    defaults = {
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    return read_spec(
        {**defaults, **config, "mlp_bias": bias},
        qkv_bias=bias,
        output_bias=bias,
        norm=NormSpec(number(config, "norm_epsilon", 1e-5), "layer", bias=True),
        gated=False,
    )
