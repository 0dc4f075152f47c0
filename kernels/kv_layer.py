"""The KV cache of one layer, and how a model's is stored: what attention reads and `rope_kv_write` fills."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch

KVKind = Literal["float", "fp8", "int8", "int4"]
GROUP = 32  # values of a head that share a scale and a minimum, in int4
_KINDS: dict[torch.dtype, KVKind] = {
    torch.float8_e4m3fn: "fp8",
    torch.int8: "int8",
    torch.uint8: "int4",
}


@dataclass(frozen=True)
class KVLayer:
    """Keys and values of one layer, each [num_pages, page_size, num_kv_heads, n], contiguous.

    n is head_dim, and head_dim / 2 for bytes with two 4-bit values each. int8 and int4 have scales beside
    them, float16 [num_pages, page_size, num_kv_heads, m]: of a head the first is its scale in int8, in int4
    the scales of its groups are followed by their minima. fp8 has one scale for all keys of the layer, and
    one for all values: what is read is multiplied by it.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def kind(self) -> KVKind:
        """Name of the arithmetic between what is stored and what is computed."""
        return _KINDS.get(self.keys.dtype, "float")

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Keys, values, and their scales if they have any."""
        if self.key_scales is None or self.value_scales is None:
            return self.keys, self.values
        return self.keys, self.values, self.key_scales, self.value_scales

    def pointers(self) -> tuple[torch.Tensor, ...]:
        """Return the four tensors that kernels take; keys and values in place of scales if there are none."""
        return (*self.tensors, *self.tensors)[:4]

    def constants(self) -> dict[str, Any]:
        """Return what kernels know of the layout when they are compiled, and check that it is contiguous."""
        assert all(tensor.is_contiguous() for tensor in self.tensors)
        num_scales = 0 if self.key_scales is None else self.key_scales.shape[3]
        return {"KV_KIND": self.kind, "STORED": self.keys.shape[3], "NUM_SCALES": num_scales}


Zeros = Callable[[torch.dtype, int, int], torch.Tensor]
"""Returns zeros of a dtype, [num_pages, elements of a page]."""


@dataclass(frozen=True)
class KVStorage:
    """How the keys and values of a model are stored: elements of a dtype, and float16 scales beside them.

    `packing` values are in one element. `scales_per_value` is one ratio for all layers: pages with equally
    many values have equally many scales, so that layers with heads of different sizes share pages.
    """

    dtype: torch.dtype
    packing: int = 1
    scales_per_value: Fraction = Fraction(0)

    @classmethod
    def of(cls, kv_dtype: str, dtype: torch.dtype, head_dims: Collection[int]) -> "KVStorage":
        """Return the storage that the setting `kv_dtype` names, for a model of a dtype and its head sizes.

        Raises ValueError, naming the setting, for heads that cannot be stored so.
        """
        if kv_dtype == "bfloat16":
            return cls(torch.bfloat16)
        if kv_dtype == "fp8":
            return cls(torch.float8_e4m3fn)
        if kv_dtype == "int8":
            return cls(torch.int8, 1, _scales_per_value(dict.fromkeys(head_dims, 1)))
        if kv_dtype == "int4":
            if odd := [size for size in head_dims if size % 2]:
                raise ValueError(
                    f"kv_dtype: int4 packs two values of a head into a byte, and a head has {odd[0]}"
                )
            return cls(torch.uint8, 2, _scales_per_value({size: 2 * num_groups(size) for size in head_dims}))
        return cls(dtype)

    def num_bytes(self, num_values: int) -> int:
        """Return the bytes of as many keys (or values), scales included."""
        scales = int(num_values * self.scales_per_value) * torch.float16.itemsize
        return num_values // self.packing * self.dtype.itemsize + scales

    def allocate(self, num_pages: int, page_values: int, zeros: Zeros) -> tuple[torch.Tensor, ...]:
        """Return the memory of the keys and values of `num_pages` pages with `page_values` each."""
        # Bytes, since torch copies no rows of fp8 by index.
        dtype = torch.uint8 if self.dtype == torch.float8_e4m3fn else self.dtype
        pages = [zeros(dtype, num_pages, page_values // self.packing) for _ in range(2)]
        if self.scales_per_value:
            num_scales = int(page_values * self.scales_per_value)
            pages += [zeros(torch.float16, num_pages, num_scales) for _ in range(2)]
        return tuple(pages)

    def layer(
        self,
        pages: Sequence[torch.Tensor],
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> KVLayer:
        """Return views of `pages`, the memory that `allocate` returned, for a layer with such heads."""
        heads = (-1, page_size, num_kv_heads)
        stored = [tensor.view(self.dtype).view(*heads, head_dim // self.packing) for tensor in pages[:2]]
        num_scales = int(head_dim * self.scales_per_value)
        key_scales, value_scales = [tensor.view(*heads, num_scales) for tensor in pages[2:]] or (None, None)
        return KVLayer(stored[0], stored[1], key_scales, value_scales, key_scale, value_scale)


def num_groups(head_dim: int) -> int:
    """Return the number of groups of a head in int4; the last may be smaller."""
    return -(-head_dim // GROUP)


def _scales_per_value(needed: dict[int, int]) -> Fraction:
    """Return the least ratio that gives each head size a whole number of scales, at least the one needed."""
    unit = math.gcd(*needed)
    return Fraction(max(-(-count * unit // size) for size, count in needed.items()), unit)
