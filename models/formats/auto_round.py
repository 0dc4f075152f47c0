"""AutoRound checkpoints (Cheng et al., 2023): linears as GPTQ or AWQ packs them, with options for each layer.

The packing has the name `auto_round:auto_gptq` (zero points less one), `auto_round:gptqmodel` or
`auto_round` (zero points as they are) or `auto_round:auto_awq`. `extra_config` has options of modules by
their names, or by patterns that are found in these; 16 bits leave a module out.
Inputs keep their own order: models/placement.py checks that a stored g_idx says so.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from models.errors import ModelError
from models.formats import refusal
from models.formats.awq import AwqWeights
from models.formats.base import LinearShape, LinearWeights, MakeStored, Shard
from models.formats.dense import DenseWeights
from models.formats.gptq import GptqWeights
from models.formats.stored_int import StoredInt, one_packing, packing_of
from models.weight_names import all_or_none, is_in_layer

# What follows `auto_round:` -> the class, what is added to stored zero points, and the bits there are.
_Layout = tuple[type[StoredInt], int, tuple[int, ...]]
_GPTQ: _Layout = (GptqWeights, 1, (4, 8))
_GPTQ_V2: _Layout = (GptqWeights, 0, (4, 8))
_AWQ: _Layout = (AwqWeights, 0, (4,))
_LAYOUTS = {
    "auto_gptq": _GPTQ,
    "gptq": _GPTQ,
    "gptqmodel": _GPTQ_V2,
    "": _GPTQ_V2,
    "exllamav2": _GPTQ_V2,  # kernels, by older versions
    "triton": _GPTQ_V2,
    "auto_awq": _AWQ,
    "awq": _AWQ,
}
_UNQUANTIZED_BITS = 16
_GUESS = "the configuration has no packing_format: it is taken to be auto_round:auto_gptq"
_PATTERN = re.compile(r"[*^$|()\[\]?+\\]")  # what names of modules never have


def stored(
    quantization: Mapping[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard
) -> MakeStored:
    """Return a maker of linears by the options of their modules. Raises ModelError for other packings."""
    packing = quantization.get("packing_format")
    is_guessed = False
    if packing is None:
        backend = str(quantization.get("backend"))
        is_guessed = not backend.startswith(("auto_round", "autoround"))
        packing = "auto_round:auto_gptq" if is_guessed else backend
    kind = f"{packing}:".split(":")[1]
    if kind not in _LAYOUTS:
        raise ModelError(f"AutoRound of packing_format '{packing}' is not supported; GPTQ's and AWQ's are")
    make, zero_offset, allowed = _LAYOUTS[kind]
    blocks = [*_names(quantization.get("block_name_to_quantize") or quantization.get("to_quant_block_names"))]

    def options_of(module: str) -> Mapping[str, Any] | None:
        extra = _extra(module, quantization)
        is_in_block = module.startswith(tuple(blocks)) if blocks else is_in_layer([module])
        if extra is None and not is_in_block:
            return None
        options = {**quantization, **(extra or {})}
        return None if options.get("bits") == _UNQUANTIZED_BITS else options

    def make_linear(modules: Sequence[str], shape: LinearShape) -> LinearWeights:
        options = [options_of(module) for module in modules]
        if all_or_none(modules, [found is None for found in options]):
            return DenseWeights(shape, dtype, device, shard)
        packings = (
            packing_of(_checked(found or {}), "AutoRound", shape.in_features, allowed) for found in options
        )
        packing = one_packing(modules, packings)
        packing = replace(packing, zero_offset=zero_offset)
        weights = make(modules, shape, dtype, device, shard, packing)
        if is_guessed:
            weights.fallback = "; ".join(filter(None, (weights.fallback, _GUESS)))
        return weights

    return make_linear


def _checked(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return options of a module. Raises ModelError if they are not those of integers with 16-bit inputs."""
    data_type, act_bits = str(options.get("data_type") or "int"), options.get("act_bits")
    if data_type.startswith("nv_fp"):
        raise refusal("nvfp4", f"AutoRound of the data_type '{data_type}'")
    if data_type != "int":
        raise ModelError(f"AutoRound of the data_type '{data_type}' is not supported; 'int' is")
    if act_bits and (type(act_bits) is not int or act_bits < _UNQUANTIZED_BITS):
        raise ModelError(f"AutoRound with activations of {act_bits!r} bits is not supported")
    return options


def _extra(module: str, quantization: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the options of a module's own: by its name, or else by the first pattern that it has."""
    extra: Mapping[str, Any] = quantization.get("extra_config") or {}
    if module in extra:
        return extra[module]  # type: ignore[no-any-return]
    try:
        return next(
            (extra[key] for key in extra if _PATTERN.search(key) and re.search(key, module)),
            None,
        )
    except re.error as error:
        raise ModelError(f"AutoRound: a key of the extra_config is no pattern: {error}") from None


def _names(value: Any) -> Iterator[str]:
    """Yield the names in a list, in lists of a list, or in a text with commas between them."""
    if isinstance(value, str):
        yield from (name.strip() for name in value.split(","))
    elif isinstance(value, Sequence):
        for item in value:
            yield from _names(item)
