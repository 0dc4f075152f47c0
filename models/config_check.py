"""Bounds on the numbers of a configuration, so that a wrong one is an error and not a huge allocation."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from models.config_values import count, mapping
from models.errors import ModelError
from models.rope import inverse_frequencies
from models.spec import DecoderSpec, MoeSpec

# The least and the most of sizes and counts in a config.json, whichever family reads them. A number outside
# is a mistake: known models have up to 126 layers, 512 experts, heads of 576 elements and contexts of a
# million tokens. Where 0 is allowed it means that there is none.
_MOST = (1 << 31) - 1
_BOUNDS = {
    "vocab_size": (1, _MOST),
    "hidden_size": (1, _MOST),
    "intermediate_size": (0, _MOST),
    "num_hidden_layers": (1, 1024),
    "num_attention_heads": (1, 1 << 16),
    "num_key_value_heads": (1, 1 << 16),
    "head_dim": (1, 1 << 16),
    "max_position_embeddings": (1, 1 << 22),
    "original_max_position_embeddings": (1, 1 << 22),
    "sliding_window": (0, _MOST),
    "num_experts": (0, 1 << 16),
    "num_local_experts": (0, 1 << 16),
    "n_routed_experts": (0, 1 << 16),
    "n_shared_experts": (0, 1 << 16),
    "num_experts_per_tok": (0, 1 << 16),
    "moe_intermediate_size": (0, _MOST),
    "shared_expert_intermediate_size": (0, _MOST),
    "shared_intermediate_size": (0, _MOST),
    "n_group": (1, 1 << 16),
    "topk_group": (1, 1 << 16),
    "decoder_sparse_step": (1, 1024),
    "first_k_dense_replace": (0, 1024),
    "max_window_layers": (0, _MOST),
    "no_rope_layer_interval": (1, 1024),
    "num_nextn_predict_layers": (0, 1024),
}
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # each may be a list


def check_config(config: Mapping[str, Any]) -> None:
    """Check that sizes and counts are whole numbers within bounds; missing ones are left to the family.

    Those of a text model in `text_config` as well. Raises ModelError, naming the key.
    """
    for values in (config, mapping(config, "text_config")):
        for key, (least, most) in _BOUNDS.items():
            if not least <= count(values, key, least) <= most:
                raise ModelError(f"{key} is {values[key]!r:.99}, which is not between {least} and {most}")
        for key in _TOKEN_IDS:
            token_ids = values.get(key)
            for token_id in token_ids if isinstance(token_ids, list) else [token_ids]:
                count({key: token_id}, key, 0)


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
        most = _BOUNDS[key][1]
        if not 1 <= size <= most:
            raise ModelError(f"{key} is {size}, which is not between 1 and {most}")
    for name, number in _numbers("", spec):
        if not (math.isfinite(number) and number >= 0):
            raise ModelError(f"{name} is {number}")
    for rope in {attention.rope for attention in attentions}:
        if rope is not None and not inverse_frequencies(rope, spec.max_position)[0].isfinite().all():
            raise ModelError(f"the rotary frequencies of {rope} are not finite")


def check_experts(spec: DecoderSpec, num_bytes: int) -> None:
    """Check that tensors of `num_bytes` bytes can hold a spec's experts, before their parameters are listed.

    A weight has at least one bit. Raises ModelError with the numbers.
    """
    experts = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec)]
    num_weights = sum(3 * moe.num_experts * moe.intermediate_size * spec.hidden_size for moe in experts)
    if num_weights > 8 * num_bytes:
        raise ModelError(
            f"{experts[0].num_experts} experts in {len(experts)} layers, as the configuration says, are "
            f"{num_weights:,} weights, and the checkpoint has {num_bytes:,} bytes"
        )


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
