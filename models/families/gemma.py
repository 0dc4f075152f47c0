"""Gemma: Llama's layers with norms times 1 + weight, and scaled embeddings."""

from dataclasses import replace
from typing import Any

from models.config_values import flag, number
from models.families.llama_like import WEIGHT_MAP, read_spec, refuse
from models.spec import DecoderSpec, NormPlacement, NormSpec, QKNormKind

__all__ = ["WEIGHT_MAP", "read_gemma_spec", "spec"]


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a GemmaConfig as in config.json."""
    # Configurations of the first releases say "gelu" and mean its approximation.
    activation = config.get("hidden_activation") or config.get("hidden_act", "gelu")
    activation = "gelu_pytorch_tanh" if activation == "gelu" else activation
    return read_gemma_spec({"num_key_value_heads": 16, **config, "hidden_activation": activation})


def read_gemma_spec(
    config: dict[str, Any],
    *,
    qk_norm: QKNormKind | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    norms: NormPlacement = "before",
) -> DecoderSpec:
    """Read what the configurations of all Gemmas have in common; the keywords are those of `read_spec`."""
    refuse(config, "use_bidirectional_attention")
    defaults = {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
    activation = config.get("hidden_activation", "gelu_pytorch_tanh")
    bias = flag(config, "attention_bias")
    norm = NormSpec(number(config, "rms_norm_eps", 1e-6), offset=1.0, fp32_weight=True)
    spec = read_spec(
        {**defaults, **config, "hidden_act": activation},
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=qk_norm,
        scale=scale,
        softcap=softcap,
        norm=norm,
        norms=norms,
    )
    return replace(
        spec,
        embedding_scale=spec.hidden_size**0.5,
        logits_softcap=number(config, "final_logit_softcapping", 0.0),
    )
