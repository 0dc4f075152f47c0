"""Sizes of a decoder: its parameters, and the memory of its tensors."""

from collections.abc import Iterator
from math import prod
from typing import Any

from torch import Tensor

from models.decoder import Decoder
from models.layers import LinearLeaf


def num_parameters(decoder: Decoder) -> int:
    """Return the number of parameters of a decoder; those of a linear do not depend on its weight format."""
    leaves = {id(leaf): leaf for leaf, _, _ in decoder.parameters().values()}
    return sum(
        leaf.shape.num_parameters
        if isinstance(leaf, LinearLeaf)
        else sum(prod(shape) for shape in leaf.parameters().values())
        for leaf in leaves.values()
    )


def num_bytes(decoder: Decoder) -> int:
    """Return the bytes of all tensors that a filled decoder holds, each storage once."""
    storages = {}
    for tensor in _tensors(decoder, set()):
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors among the attributes and items of objects below `value`."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, type) and id(value) not in seen:
        seen.add(id(value))
        yield from _tensors(vars(value), seen)
