"""Command R: attention and MLP side by side, LayerNorm, interleaved rotary pairs, scaled logits."""

from dataclasses import replace
from typing import Any

from models.config_values import flag, number
from models.families import llama_like
from models.families.llama_like import read_spec
from models.spec import DecoderSpec, NormSpec, QKNormKind
from models.weight_names import Stacked

WEIGHT_MAP = llama_like.WEIGHT_MAP | {
    "model.layers.*.self_attn.q_norm": Stacked(("layers.*.attention.q_norm.*",)),
    "model.layers.*.self_attn.k_norm": Stacked(("layers.*.attention.k_norm.*",)),
}


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a CohereConfig as in config.json."""
    return read_cohere_spec(
        {"rope_theta": 500_000.0, **config},
        qk_norm="layer_norm_per_head" if flag(config, "use_qk_norm") else None,
    )


def read_cohere_spec(config: dict[str, Any], *, qk_norm: QKNormKind | None = None) -> DecoderSpec:
    """Read what the configurations of Command R and Command A have in common."""
    bias = flag(config, "attention_bias")
    spec = read_spec(
        {"max_position_embeddings": 8192, "tie_word_embeddings": True, **config},
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=qk_norm,
        interleaved=True,
        norm=NormSpec(number(config, "layer_norm_eps", 1e-5), "layer"),
        norms="parallel",
    )
    return replace(spec, logits_scale=number(config, "logit_scale", 0.0625))
