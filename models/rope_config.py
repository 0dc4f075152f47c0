"""Reads the rotary position embedding of a layer from a config.json, in the spellings that checkpoints have.

transformers 5 writes `rope_parameters`: one mapping, or one for each type of layer. Older versions wrote
`rope_scaling`, with `rope_theta` and `partial_rotary_factor` beside it.
"""

import math
from collections.abc import Mapping
from typing import Any

from models.config_values import count, flag, mapping, number, positive
from models.errors import ModelError
from models.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    QueryScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)

_DEFAULT_THETA = 10_000.0
_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
# The parameters that are read, and notes that change nothing: how the model was trained, and its window.
_KNOWN = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor",
    "long_factor", "low_freq_factor", "high_freq_factor", "finetuned",
    "llama_4_scaling_beta", "max_position_embeddings",
}  # fmt: skip


def rope_of(
    config: Mapping[str, Any],
    head_dim: int,
    layer_type: str = "full_attention",
    *,
    interleaved: bool = False,
) -> RopeSpec | None:
    """Return the rotary embedding of a configuration's layers of a type, None if they have none.

    Raises ModelError for a type or a parameter that is unknown, and for one that is missing or malformed.
    """
    parameters, is_own = _parameters_of(config, layer_type)
    if parameters is None:
        return None
    if unknown := sorted(set(parameters) - _KNOWN):
        raise ModelError(f"RoPE parameter '{unknown[0]}' is not supported")
    share = number(parameters, "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0))
    theta = positive(parameters, "rope_theta", positive(config, "rope_theta", _DEFAULT_THETA))
    rotated = int(head_dim * share)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "proportional":
        angles = int(share * head_dim // 2)
        scaling = ProportionalScaling(_number(parameters, kind, "factor", 1.0), angles)
        return RopeSpec(theta, head_dim, scaling, interleaved)
    max_position = count(config, "max_position_embeddings", 2048)
    beside = 0 if is_own else count(config, "original_max_position_embeddings", 0)
    original = int(beside or _number(parameters, kind, "original_max_position_embeddings", max_position))
    query_scaling = None
    if parameters.get("llama_4_scaling_beta"):
        if rotated != head_dim:
            raise ModelError("RoPE parameter 'llama_4_scaling_beta' with a partial rotation is not supported")
        query_scaling = QueryScaling(_number(parameters, kind, "llama_4_scaling_beta"), original)
    by_kind = _scaling(kind, parameters, original, max_position, rotated)
    return RopeSpec(theta, rotated, by_kind, interleaved, query_scaling)


def _parameters_of(config: Mapping[str, Any], layer_type: str) -> tuple[Mapping[str, Any] | None, bool]:
    """Return the parameters of a type of layer, and True if they are of that type alone.

    Raises ModelError if `rope_scaling` says something else: known programs differ in which one they read.
    """
    old = mapping(config, "rope_scaling")
    parameters = mapping(config, "rope_parameters") or old
    types = {*(config.get("layer_types") or ()), "full_attention", "sliding_attention"}
    is_own = bool(types & set(parameters))
    if is_own and layer_type not in parameters:
        raise ModelError(f"the RoPE parameters lack layers of type '{layer_type}'")
    of_type = parameters[layer_type] if is_own else parameters
    if layer_type == "full_attention" or not is_own or layer_type in old:  # alone, it is that of full layers
        _check_equal(old.get(layer_type, old) or {}, of_type or {})
    return of_type, is_own


def _check_equal(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise ModelError, naming the parameter, unless `rope_scaling` repeats what `rope_parameters` says."""
    for name, value in old.items():
        found = new.get(name)
        if name in ("type", "rope_type"):
            found = new.get("rope_type") or new.get("type") or "default"
        if value is not None and found != value:
            raise ModelError(
                f"rope_scaling and rope_parameters contradict each other: {name} is {value!r:.99} and "
                f"{found!r:.99}; remove one"
            )


def _scaling(
    kind: str, parameters: Mapping[str, Any], original: int, max_position: int, rotated: int
) -> RopeScaling | None:
    def value(name: str, default: float | None = None) -> float:
        return _number(parameters, kind, name, default)

    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(value("factor"))
        case "dynamic":
            return DynamicScaling(value("factor"), max_position)
        case "llama3":
            low, high = value("low_freq_factor"), value("high_freq_factor")
            return Llama3Scaling(value("factor"), low, high, original)
        case "yarn":
            return _yarn(parameters, original, max_position)
        case "longrope" | "su":  # its name in the first checkpoints of Phi-3
            factor = value("factor", max_position / original)
            usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            return LongRopeScaling(
                _numbers(parameters, kind, "short_factor", rotated // 2),
                _numbers(parameters, kind, "long_factor", rotated // 2),
                original,
                value("attention_factor", usual),
            )
    raise ModelError(f"RoPE scaling of type '{kind}' is not supported; supported: {', '.join(_TYPES)}")


def _yarn(parameters: Mapping[str, Any], original: int, max_position: int) -> YarnScaling:
    def value(name: str, default: float | None = None) -> float:
        return _number(parameters, "yarn", name, default)

    factor = value("factor", max_position / original if original != max_position else None)
    usual = _yarn_mscale(factor, 1.0)
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        usual = _yarn_mscale(factor, value("mscale")) / _yarn_mscale(factor, value("mscale_all_dim"))
    return YarnScaling(
        factor,
        original,
        value("attention_factor", usual),
        value("beta_fast", 32.0),
        value("beta_slow", 1.0),
        flag(parameters, "truncate", default=True),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _number(parameters: Mapping[str, Any], kind: str, name: str, default: float | None = None) -> float:
    """Return a number above 0; `default` if it is missing or null. Raises ModelError without a default."""
    try:
        return positive(parameters, name, default)
    except KeyError:
        raise ModelError(f"RoPE scaling of type '{kind}' lacks '{name}'") from None


def _numbers(parameters: Mapping[str, Any], kind: str, name: str, count: int) -> tuple[float, ...]:
    """Return a list of `count` numbers above 0. Raises ModelError."""
    values = parameters.get(name)
    if values is None:
        raise ModelError(f"RoPE scaling of type '{kind}' lacks '{name}'")
    if not isinstance(values, list) or len(values) != count:
        found = f"{len(values)} numbers" if isinstance(values, list) else f"{values!r:.99}"
        raise ModelError(
            f"RoPE scaling of type '{kind}' has {found} as '{name}'; a list of {count} is needed"
        )
    return tuple(positive({name: value}, name, 0) for value in values)
