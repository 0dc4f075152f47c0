"""Translates the metadata of a GGUF file to the configuration that it was converted from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.config_values import count
from models.errors import ModelError

_ROPE_KEYS = {
    "freq_base",
    "scale_linear",
    "dimension_count",
    "scaling.type",
    "scaling.factor",
    "scaling.original_context_length",
    "scaling.finetuned",  # a note of how the model was trained
    "scaling.yarn_beta_fast",
    "scaling.yarn_beta_slow",
}
_NEUTRAL = {"scaling.attn_factor": 1.0, "scaling.yarn_attn_factor": 1.0, "scaling.yarn_ext_factor": 1.0}


@dataclass(frozen=True)
class Metadata:
    """All keys of a file; those of its architecture are read without their prefix."""

    all: Mapping[str, Any]

    @property
    def prefix(self) -> str:
        """The name of the architecture and a dot."""
        return f"{self.all['general.architecture']}."

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of the architecture."""
        return self.all.get(self.prefix + key, default)

    def size(self, key: str, default: int | None = None) -> int:
        """Return a whole number above 0 as get() does. Raises KeyError if it is missing without default."""
        name = self.prefix + key
        value = count(self.all, name, default)
        if value < 1:
            raise ModelError(f"{name} is {value}, which is not above 0")
        return value

    def __getitem__(self, key: str) -> Any:
        return self.all[self.prefix + key]


def base_config(metadata: Metadata, *rope_keys: str) -> dict[str, Any]:
    """Return the configuration with the keys that most architectures share, under LlamaConfig's names.

    `rope_keys` are keys about RoPE that the architecture reads itself. Raises ModelError for others, and
    KeyError for a missing key.
    """
    num_heads, width = metadata.size("attention.head_count"), metadata.size("embedding_length")
    head_dim = metadata.size("attention.key_length", width // num_heads)
    _check_rope_keys(metadata, _ROPE_KEYS | set(rope_keys))
    config = {
        "vocab_size": metadata.get("vocab_size") or len(metadata.all["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": metadata["feed_forward_length"],
        "num_hidden_layers": metadata["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": metadata["context_length"],
        "rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon", 1e-6),
        "sliding_window": metadata.get("attention.sliding_window"),
        "rope_parameters": _rope_parameters(metadata),
    }
    rotated = metadata.size("rope.dimension_count", head_dim)
    if rotated > head_dim or rotated % 2:
        key = f"{metadata.prefix}rope.dimension_count"
        raise ModelError(f"{key} is {rotated}, which is not an even part of a head of {head_dim} elements")
    if rotated != head_dim:
        config["partial_rotary_factor"] = (rotated + 0.5) / head_dim  # times head_dim it is rounded down
    return config


def _check_rope_keys(metadata: Metadata, known: set[str]) -> None:
    """Refuse what a file says about RoPE and what is not read. Raises ModelError."""
    prefix = f"{metadata.prefix}rope."
    for key, value in metadata.all.items():
        name = key.removeprefix(prefix)
        if name == key or name in known or value == _NEUTRAL.get(name):
            continue
        raise ModelError(f"the metadata has {key} = {value!r:.99}, which is not supported")


def _rope_parameters(metadata: Metadata) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": metadata.get("rope.freq_base", 10_000.0)}
    # Older files have the factor of a linear scaling alone.
    linear = metadata.get("rope.scale_linear", 1.0)
    kind = metadata.get("rope.scaling.type", "linear" if linear != 1.0 else "none")
    if kind != "none":
        rope |= {
            "rope_type": kind,
            "factor": metadata.get("rope.scaling.factor") or linear,
            "original_max_position_embeddings": metadata.get("rope.scaling.original_context_length"),
            "beta_fast": metadata.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": metadata.get("rope.scaling.yarn_beta_slow"),
        }
    return rope
