"""Sizes of a decoder: its parameters, and the memory of its tensors."""

from collections.abc import Iterator
from math import prod
from typing import Any

from torch import Tensor

from models.decoder import Decoder


def num_parameters(decoder: Decoder) -> int:
    """Return the number of values in a decoder's parameters, as its checkpoint has them."""
    return sum(prod(shape) for _, _, shape in decoder.parameters().values())


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
