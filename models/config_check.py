"""Bounds on the numbers of a configuration, so that a wrong one is an error and not a huge allocation."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from models.errors import ModelError
from models.rope import inverse_frequencies
from models.spec import DecoderSpec

# Sizes and counts in a config.json, whichever family reads them. A number above its bound is a mistake: known
# models have up to 126 layers, heads of 576 elements and contexts of a million tokens.
_MOST = (1 << 31) - 1
_BOUNDS = {
    "vocab_size": _MOST,
    "hidden_size": _MOST,
    "intermediate_size": _MOST,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "max_position_embeddings": 1 << 22,
    "sliding_window": _MOST,
}


def check_config(config: Mapping[str, Any]) -> None:
    """Check that sizes and counts are whole numbers within bounds; missing ones are left to the family.

    Raises ModelError, naming the key.
    """
    for key, most in _BOUNDS.items():
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
            raise ModelError(f"{key} is {value!r:.99}, which is not a whole number")
        if not 0 <= value <= most:
            raise ModelError(f"{key} is {value!r:.99}, which is not between 0 and {most}")


def check_spec(spec: DecoderSpec) -> None:
    """Check the numbers that a family read or computed. Raises ModelError, naming one.

    All are finite and not negative, sizes within their bounds, and no rotary frequency is infinite.
    """
    sizes = [
        ("vocab_size", spec.vocab_size),
        ("hidden_size", spec.hidden_size),
        ("num_hidden_layers", spec.num_layers),
        ("max_position_embeddings", spec.max_position),
    ]
    attentions = {layer.attention for layer in spec.layers}
    for attention in attentions:
        sizes += [
            ("num_attention_heads", attention.num_heads),
            ("num_key_value_heads", attention.num_kv_heads),
            ("head_dim", attention.head_dim),
        ]
    for key, size in sizes:
        if not 1 <= size <= _BOUNDS[key]:
            raise ModelError(f"{key} is {size}, which is not between 1 and {_BOUNDS[key]}")
    for name, number in _numbers("", spec):
        if not (math.isfinite(number) and number >= 0):
            raise ModelError(f"{name} is {number}")
    for rope in {attention.rope for attention in attentions}:
        if rope is not None and not inverse_frequencies(rope, spec.max_position)[0].isfinite().all():
            raise ModelError(f"the rotary frequencies of {rope} are not finite")


def _numbers(name: str, value: Any) -> Iterator[tuple[str, int | float]]:
    """Yield every number in a dataclass and the values of its fields, with its path."""
    if is_dataclass(value):
        for field in fields(value):
            yield from _numbers(f"{name}.{field.name}".lstrip("."), getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in dict.fromkeys(value):
            yield from _numbers(name, item)
    elif isinstance(value, int | float):
        yield name, value
