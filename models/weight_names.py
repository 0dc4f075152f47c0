"""Names of tensors in a checkpoint, and addresses of parameters in a decoder.

A weight map goes from names to addresses, both without `.weight` or `.bias` and with `*` for the layer; None
marks tensors that are not loaded.
"""

import re
from collections.abc import Iterable, Mapping

from models.errors import ModelError

WeightMap = Mapping[str, str | None]

_LAYER_NUMBER = re.compile(r"\.(\d+)\.")


# Tables that older versions of libraries stored and that are computed from the configuration here.
_BUFFERS = re.compile(r"(\.rotary_emb\.\w+|\.(attn|self_attn)\.(masked_)?bias|(^|\.)position_ids)$")


def address_of(name: str, weight_map: WeightMap) -> str | None:
    """Return the address of a checkpoint's tensor, or None for one that is not loaded.

    Raises ModelError for a name that is not in the map.
    """
    if _BUFFERS.search(name):
        return None
    stem, _, kind = name.rpartition(".")
    pattern, numbers = _split(stem)
    if pattern not in weight_map:
        raise ModelError(f"the checkpoint has a tensor this architecture does not know: {name}")
    target = weight_map[pattern]
    return None if target is None else f"{_join(target, numbers)}.{kind}"


def with_prefix(name: str, weight_map: WeightMap) -> str:
    """Return a tensor's name with `model.` in front if the map knows it only so.

    Embedding models such as Qwen3-Embedding store the tensors of the bare model, without that prefix.
    """
    pattern, _ = _split(name.rpartition(".")[0])
    return f"model.{name}" if pattern not in weight_map and f"model.{pattern}" in weight_map else name


def names_of(address: str, weight_map: WeightMap) -> list[str]:
    """Return the modules of the checkpoint whose tensors are loaded at or below an address."""
    pattern, numbers = _split(address)
    return [
        _join(name, numbers)
        for name, target in weight_map.items()
        if target is not None and f"{target}.".startswith(f"{pattern}.")
    ]


def is_excluded(address: str, weight_map: WeightMap, excluded: Iterable[str]) -> bool:
    """Return True for a linear that the modules `excluded` from quantization name, by path or part of it.

    Raises ModelError if they name only some of its fused outputs.
    """
    names = names_of(address, weight_map)
    found = [any(f".{part}." in f".{name}." for part in excluded) for name in names]
    if any(found) and not all(found):
        raise ModelError(f"only some of {', '.join(names)} are quantized, and they are one product here")
    return any(found)


def _split(path: str) -> tuple[str, list[str]]:
    pattern = _LAYER_NUMBER.sub(".*.", f"{path}.").removesuffix(".")
    return pattern, _LAYER_NUMBER.findall(f"{path}.")


def _join(pattern: str, numbers: list[str]) -> str:
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern
