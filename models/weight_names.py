"""Names of tensors in a checkpoint, and addresses of parameters in a decoder.

A weight map goes from names to addresses, both without `.weight` or `.bias` and with `*` for the layer and
the expert or head. A tensor that has another name for these is there with its whole name, and its whole
address. A tensor that fills several parameters has a `Packed`; None marks tensors that are not loaded, for
`part.**` all whose names begin with the part.
"""

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from models.errors import ModelError
from models.spec import DecoderSpec


@dataclass(frozen=True)
class Packed:
    """Addresses of several parameters that one tensor of a checkpoint fills: weights, biases or scales.

    Their rows follow each other in the tensor, or do so after `arrange`, which takes it and the spec.
    """

    addresses: tuple[str, ...]
    arrange: Callable[[Tensor, DecoderSpec], Tensor] | None = None

    def divide(
        self, name: str, tensor: Tensor, spec: DecoderSpec, shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each address and its rows of the tensor `name`, given the shapes of the parameters.

        A single value, such as one scale of the whole tensor, fills parameters of one value each, and a
        tensor of the shape that all parameters have, such as the groups of inputs, fills each. Formats that
        store weights transposed have columns for rows. Raises ModelError if the tensor has not as many rows
        as the parameters, or the decoder lacks one of them.
        """
        if not all(address in shapes for address in self.addresses):
            raise ModelError(f"the configuration has no place for {name}")
        if tensor.numel() == 1 and all(math.prod(shapes[address]) == 1 for address in self.addresses):
            yield from ((address, tensor) for address in self.addresses)
            return
        sizes = [shapes[address] for address in self.addresses]
        if len(sizes) > 1 and all(size == tuple(tensor.shape) for size in sizes):
            yield from ((address, tensor) for address in self.addresses)
            return
        if len(sizes) > 1 and all(size[:-1] == tuple(tensor.shape[:-1]) != () for size in sizes):
            columns = [size[-1] for size in sizes]
            if self.arrange is not None or tensor.shape[-1] != sum(columns):
                raise ModelError(f"{name}, packed by columns, cannot be divided into {columns}")
            yield from zip(self.addresses, tensor.split_with_sizes(columns, -1), strict=True)
            return
        rows = [shapes[address][0] if shapes[address] else 0 for address in self.addresses]
        if tensor.ndim == 0 or len(tensor) != sum(rows):
            raise ModelError(
                f"{name} has the shape {list(tensor.shape)}; the configuration says {sum(rows)} rows"
            )
        if self.arrange is not None:
            tensor = self.arrange(tensor, spec)
        yield from zip(self.addresses, torch.split_with_sizes(tensor, rows), strict=True)


@dataclass(frozen=True)
class Stacked(Packed):
    """Addresses that a tensor of all experts (or heads) fills, with `*` for its first index, the expert.

    `arrange` takes what the tensor has of one expert.
    """

    def divide(
        self, name: str, tensor: Tensor, spec: DecoderSpec, shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, Tensor]]:
        if tensor.ndim < 2:
            raise ModelError(f"{name} has the shape {list(tensor.shape)}, which is no stack of experts")
        for expert, part in enumerate(tensor):
            addresses = tuple(_join(address, [str(expert)]) for address in self.addresses)
            if self.arrange is not None:
                part = self.arrange(part, spec)
            yield from Packed(addresses).divide(f"{name}[{expert}]", part, spec, shapes)


Target = str | Packed | None
WeightMap = Mapping[str, Target]

_LAYER_NUMBER = re.compile(r"\.(\d+)\.")


# Tables that older versions of libraries stored and that are computed from the configuration here.
_BUFFERS = re.compile(r"(\.rotary_emb\.\w+|\.(attn|self_attn)\.(masked_)?bias|(^|\.)position_ids)$")
# Scales of quantized queries, keys and values: no parameters. models/kv_scales.py reads those of KV in fp8.
_KV_SCALES = re.compile(r"\.self_attn\.(([qkv]_proj\.)?(q|k|v|kv)_scale|[qkv]_proj\.output_scale)$")


def is_known(name: str, weight_map: WeightMap) -> bool:
    """Return True for a tensor that the map names, or one that no architecture loads."""
    if _is_unread(name, weight_map):
        return True
    return any(_split(path)[0] in weight_map for path in (name, name.rpartition(".")[0]))


def target_of(name: str, weight_map: WeightMap) -> Target:
    """Return the address or addresses of a checkpoint's tensor, or None for one that is not loaded.

    Raises KeyError for a name that is not in the map.
    """
    if _is_unread(name, weight_map):
        return None
    pattern, numbers = _split(name)
    ending = ""
    if pattern not in weight_map:
        stem, _, kind = name.rpartition(".")
        (pattern, numbers), ending = _split(stem), f".{kind}"
    target = weight_map[pattern]
    if isinstance(target, Packed):
        addresses = tuple(f"{_join(address, numbers)}{ending}" for address in target.addresses)
        return replace(target, addresses=addresses)
    return None if target is None else f"{_join(target, numbers)}{ending}"


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a checkpoint's tensor belongs to, if any."""
    _, numbers = _split(name)
    return int(numbers[0]) if numbers else None


def is_in_layer(modules: Sequence[str]) -> bool:
    """Return True for modules of a layer, False for an output head."""
    return all(layer_of(module) is not None for module in modules)


def pattern_of(name: str) -> str:
    """Return a tensor's name with `*` for the layer and the expert or head."""
    return _split(name)[0]


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
        if any(f"{filled}.".startswith(f"{pattern}.") for filled in _addresses(target))
    ]


def modules_of(address: str, weight_map: WeightMap, filled: Container[str]) -> list[str]:
    """Return the modules among those `filled` in a checkpoint that a linear is loaded from.

    A map may have several names for what a linear is loaded from: all are returned if none is filled, as of a
    checkpoint that lacks the linear. Of experts the first one's modules are returned.
    """
    names = [name.replace(".*.", ".0.") for name in names_of(address, weight_map)]
    return [name for name in names if name in filled] or names


def is_excluded(modules: Sequence[str], excluded: Iterable[str]) -> bool:
    """Return True if names `excluded` from quantization are paths of the modules, or parts of such paths.

    Dots around a name mean nothing. Raises ModelError if they name only some of the modules, which fill one
    linear.
    """
    parts = [part.strip(".") for part in excluded]
    found = [any(f".{part}." in f".{name}." for part in parts) for name in modules]
    return all_or_none(modules, found)


def names_under(key: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names that a configuration lists under a key, or the one it has there. Raises ModelError."""
    found = config.get(key)
    names = () if found is None else (found,) if isinstance(found, str) else found
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"'{key}' is {found!r}, and not a list of names")
    return tuple(names)


def all_or_none(modules: Sequence[str], found: Sequence[bool]) -> bool:
    """Return what is true of all modules that fill one linear. Raises ModelError if it is of only some."""
    if any(found) and not all(found):
        raise ModelError(f"only some of {', '.join(modules)} are quantized, and they are one product here")
    return any(found)


def _is_unread(name: str, weight_map: WeightMap) -> bool:
    below_unread = f"{name.partition('.')[0]}.**" in weight_map
    return below_unread or bool(_BUFFERS.search(name) or _KV_SCALES.search(name))


def _addresses(target: Target) -> tuple[str, ...]:
    if isinstance(target, Packed):
        return target.addresses
    return () if target is None else (target,)


def _split(path: str) -> tuple[str, list[str]]:
    pattern = _LAYER_NUMBER.sub(".*.", f"{path}.").removesuffix(".")
    return pattern, _LAYER_NUMBER.findall(f"{path}.")


def _join(pattern: str, numbers: list[str]) -> str:
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern
