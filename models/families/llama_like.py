"""Shared by families with Llama's layers: names of tensors, and reading of their configurations.

A family imports what it does not change, and extends the maps with its own tensors.
"""

from dataclasses import replace
from typing import Any

from models.config_values import count, flag, mapping, number
from models.errors import ModelError
from models.rope_config import rope_of
from models.spec import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormPlacement,
    NormSpec,
    QKNormKind,
)
from models.weight_names import Target

WEIGHT_MAP: dict[str, Target] = {
    "model.embed_tokens": "embedding",
    "model.layers.*.input_layernorm": "layers.*.attention_norm",
    "model.layers.*.self_attn.q_proj": "layers.*.attention.qkv.q",
    "model.layers.*.self_attn.k_proj": "layers.*.attention.qkv.k",
    "model.layers.*.self_attn.v_proj": "layers.*.attention.qkv.v",
    "model.layers.*.self_attn.o_proj": "layers.*.attention.output",
    "model.layers.*.post_attention_layernorm": "layers.*.mlp_norm",
    "model.layers.*.mlp.gate_proj": "layers.*.mlp.gate_up.gate",
    "model.layers.*.mlp.up_proj": "layers.*.mlp.gate_up.up",
    "model.layers.*.mlp.down_proj": "layers.*.mlp.down",
    "model.norm": "norm",
    "lm_head": "output",
    "score": "score",
}

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def read_spec(
    config: dict[str, Any],
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: QKNormKind | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    interleaved: bool = False,
    norm: NormSpec | None = None,
    norms: NormPlacement = "before",
    gated: bool = True,
) -> DecoderSpec:
    """Read a config.json with the keys of LlamaConfig.

    The keywords are what the family decides itself; the rest is read from `config`. `interleaved` is of the
    rotated pairs; without `norm` it is RMSNorm.
    """
    num_heads = count(config, "num_attention_heads")
    head_dim = count(config, "head_dim", count(config, "hidden_size") // num_heads)
    activation = config.get("hidden_act", "silu")
    supported = [name for name, kind in _ACTIVATIONS.items() if not (gated and kind in ("relu", "relu2"))]
    if activation not in supported:
        gate = " in a gated MLP" if activation in [*_ACTIVATIONS] else ""
        raise ModelError(
            f"activation {activation!r:.99} is not supported{gate}; supported: {', '.join(supported)}"
        )
    mlp = MlpSpec(
        count(config, "intermediate_size"), _ACTIVATIONS[activation], flag(config, "mlp_bias"), gated
    )
    kinds = _layer_types(config)
    layers = {
        kind: LayerSpec(
            AttentionSpec(
                num_heads=num_heads,
                num_kv_heads=count(config, "num_key_value_heads", num_heads),
                head_dim=head_dim,
                rope=rope_of(config, head_dim, kind, interleaved=interleaved),
                qkv_bias=qkv_bias,
                output_bias=output_bias,
                window=count(config, "sliding_window", 0) if kind == "sliding_attention" else 0,
                qk_norm=qk_norm,
                scale=scale,
                softcap=softcap,
            ),
            mlp,
            norms,
        )
        for kind in set(kinds)
    }
    num_labels = _num_labels(config)
    return DecoderSpec(
        vocab_size=count(config, "vocab_size"),
        hidden_size=count(config, "hidden_size"),
        max_position=count(config, "max_position_embeddings", 2048),
        norm=norm or NormSpec(number(config, "rms_norm_eps", 1e-6)),
        tie_embeddings=flag(config, "tie_word_embeddings") and not num_labels,
        layers=tuple(layers[kind] for kind in kinds),
        num_labels=num_labels,
    )


def refuse(config: dict[str, Any], *keys: str) -> None:
    """Raise ModelError if a configuration asks for one of these options, which are not computed here."""
    for key in keys:
        if config.get(key):
            raise ModelError(f"{key} = {config[key]!r:.99} is not supported")


def refuse_unless(config: dict[str, Any], key: str, *values: Any) -> None:
    """Raise ModelError if a configuration gives a key that is not read another value than one of these."""
    if config.get(key) not in (None, *values):
        raise ModelError(
            f"{key} = {config[key]!r:.99} is not supported; supported: {', '.join(map(str, values))}"
        )


def beside_images(weight_map: dict[str, Target]) -> dict[str, Target]:
    """Return the map of a text model that is part of a model with images, whose other parts are skipped."""
    text = {f"language_model.{name}": target for name, target in weight_map.items()}
    return {**text, "vision_tower.**": None, "multi_modal_projector.**": None}


def without_rope_in_full_layers(spec: DecoderSpec) -> DecoderSpec:
    """Return the spec with positions only in the layers that have a window."""
    return spec.with_attention(
        lambda _, attention: attention if attention.window else replace(attention, rope=None)
    )


def _num_labels(config: dict[str, Any]) -> int:
    """Return the outputs of the score head, 0 for a language model.

    transformers writes `id2label` only for a number of labels other than its default, 2.
    """
    if not any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or ()):
        return 0
    labels = config.get("id2label")
    return count(config, "num_labels", len(labels) if isinstance(labels, dict) and labels else 2)


def _layer_types(config: dict[str, Any]) -> list[str]:
    """Return the type of each layer. Without `layer_types`, all have the window, if there is one."""
    usual = "sliding_attention" if config.get("sliding_window") else "full_attention"
    types = config.get("layer_types") or [usual] * count(config, "num_hidden_layers")
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise ModelError(f"layer_types is {types!r:.99}, which is not a list of names")
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise ModelError(f"layers of type {', '.join(sorted(unknown))} are not supported")
    if len(types) != count(config, "num_hidden_layers"):
        raise ValueError(f"{len(types)} layer_types for {config['num_hidden_layers']} layers")
    return list(types)


def with_layer_types(config: dict[str, Any], pattern: int) -> dict[str, Any]:
    """Return the configuration with `layer_types`: as they are, or a full layer after `pattern - 1` others.

    The key `sliding_window_pattern` of older configurations comes before the argument.
    """
    if config.get("layer_types"):
        return config
    if (pattern := count(config, "sliding_window_pattern", pattern)) < 1:
        raise ModelError(f"sliding_window_pattern is {pattern}, which is not above 0")
    kinds = ["full_attention", "sliding_attention"]
    types = [kinds[layer % pattern > 0] for layer in range(1, count(config, "num_hidden_layers") + 1)]
    return {**config, "layer_types": types}


def with_rope_by_layer_type(config: dict[str, Any], full: float, sliding: float) -> dict[str, Any]:
    """Return the configuration with `rope_parameters` for full layers and for those with a window.

    The base of either is the argument if `rope_parameters` has none. In older configurations `rope_scaling`
    is that of full layers.
    """
    given = mapping(config, "rope_parameters") or {"full_attention": config.get("rope_scaling")}
    bases = {"full_attention": full, "sliding_attention": sliding}
    by_type = {kind: {"rope_theta": base, **mapping(given, kind)} for kind, base in bases.items()}
    return {**config, "rope_parameters": by_type}


def with_qwen_windows(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with Qwen's rule for windows written out in the keys `read_spec` reads.

    Layers have a window only if `use_sliding_window` is set: those that `layer_types` names, or without it
    all from `max_window_layers` on.
    """
    config = dict(config)
    if not flag(config, "use_sliding_window"):
        config["sliding_window"] = None
    if not config.get("layer_types"):
        num_full = count(config, "max_window_layers", 28)
        kinds = ["full_attention", "sliding_attention"]
        config["layer_types"] = [
            kinds[layer >= num_full] for layer in range(count(config, "num_hidden_layers"))
        ]
    return config
