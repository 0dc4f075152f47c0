"""Checkpoints of compressed-tensors: groups of modules, each with a scheme of its own; the rest is dense.

A group names its modules by class (`Linear`), by their names, or by `re:` and a pattern that their names
begin with; so does `ignore` those that are left out. Names and patterns precede the class.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, cast

import torch

from models.errors import ModelError
from models.formats import refusal
from models.formats.base import LinearShape, LinearWeights, MakeStored, Shard
from models.formats.dense import DenseWeights
from models.weight_names import all_or_none, names_under

# `format` -> a function that takes the QuantizationArgs of the weights, what a Conversion takes, and those of
# the input_activations, if there are any.
SCHEMES = {
    "float-quantized": "models.formats.naive_quantized:scheme",
    "int-quantized": "models.formats.naive_quantized:scheme",
    "naive-quantized": "models.formats.naive_quantized:scheme",
    "pack-quantized": "models.formats.pack_quantized:scheme",
}
_WEIGHT_ONLY = ("pack-quantized",)
_CLASS = "Linear"


def stored(
    quantization: Mapping[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard
) -> MakeStored:
    """Return a maker of linears by the groups of the configuration. Raises ModelError for unknown schemes."""
    sparsity = (quantization.get("sparsity_config") or {}).get("format") or "dense"
    if sparsity != "dense":
        raise ModelError(f"sparse weights in the format '{sparsity}' are not supported")
    if (quantization.get("transform_config") or {}).get("config_groups"):
        raise ModelError("weights with a transform_config (rotations) are not supported")
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError("the quantization_config has no config_groups")
    makers = [
        (_maker(name, group, quantization, dtype, device, shard), names_under("targets", group))
        for name, group in groups.items()
    ]
    ignored = names_under("ignore", quantization)

    def make_linear(modules: Sequence[str], shape: LinearShape) -> LinearWeights:
        if not _are_named(modules, ignored):
            for make, targets in makers:
                if _are_named(modules, [target for target in targets if target != _CLASS]):
                    return make(modules, shape)
            for make, targets in makers:
                if _CLASS in targets:
                    return make(modules, shape)
        return DenseWeights(shape, dtype, device, shard)

    return make_linear


def _maker(
    name: str,
    group: Mapping[str, Any],
    quantization: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
) -> MakeStored:
    """Return what makes the linears of a group. Raises ModelError, naming the group."""
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise ModelError(f"{name} of the config_groups does not say how its weights are quantized")
    kind = str(group.get("format") or quantization.get("format"))
    if kind.startswith("nvfp4"):
        raise refusal("nvfp4", f"{name}: the format '{kind}' of compressed-tensors")
    if kind not in SCHEMES:
        raise ModelError(
            f"weights of compressed-tensors in the format '{kind}' are not supported ({name} has it); "
            f"supported: {', '.join(SCHEMES)}"
        )
    for part in ("output_activations", *["input_activations"] * (kind in _WEIGHT_ONLY)):
        if group.get(part):
            raise ModelError(f"{name}: {part} that are quantized are not supported with '{kind}'")
    inputs = [args] if (args := group.get("input_activations")) else []
    if not all(isinstance(args, Mapping) for args in inputs):
        raise ModelError(f"{name}: 'input_activations' is {args!r}, and not a JSON object")
    try:
        return cast(MakeStored, resolve_name(SCHEMES[kind])(group["weights"], dtype, device, shard, *inputs))
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None


def _are_named(modules: Sequence[str], targets: Iterable[str]) -> bool:
    """Return True if targets name all of the modules that fill one linear. Raises ModelError if only some."""
    try:
        found = [
            any(
                re.match(target.removeprefix("re:"), module) is not None
                if target.startswith("re:")
                else target in (_CLASS, module)
                for target in targets
            )
            for module in modules
        ]
    except re.error as error:
        raise ModelError(f"compressed-tensors: a target is no pattern: {error}") from None
    return all_or_none(modules, found)
