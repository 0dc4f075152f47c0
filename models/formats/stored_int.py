"""Base of formats whose checkpoints store integers of 4 or 8 bits, and how they pack them into int32."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.errors import ModelError
from models.formats.base import LinearShape, Shard, UnquantizedWeights
from models.formats.dense import DenseWeights
from models.formats.int4 import Int4Weights
from models.formats.int8 import Int8Weights
from models.formats.stored_parts import StoredParts

_ZERO_OF_INT8 = 128
_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Packing:
    """How a checkpoint stores the integers of a linear.

    A group of `group_size` inputs has one scale. `has_zeros`: it has a zero point, too, to which
    `zero_offset` is added; else that is 2 ** (bits - 1). `has_order`: the group of each input is stored, as
    inputs may be quantized in the order of their activations.
    """

    bits: int
    group_size: int
    has_zeros: bool = True
    has_order: bool = False
    zero_offset: int = 0

    @property
    def per_int32(self) -> int:
        """Integers in an int32."""
        return 32 // self.bits

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the codes uint8 [n, per_int32 * m] of int32 [n, m], the lowest bits first."""
        both = packed.contiguous().view(torch.uint8)
        return both if self.bits == 8 else torch.stack((both & 15, both >> 4), -1).flatten(1)

    def unpack_zeros(self, packed: Tensor) -> Tensor:
        """Return the zero points of `unpack`."""
        return self.unpack(packed) + self.zero_offset & (1 << self.bits) - 1


class Codes(NamedTuple):
    """The integers of rows: uint8 [n, in_features], with scales [n, groups].

    zeros: uint8 of the shape of scales, or None. order: int [in_features], the group of each input, or None.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None


class StoredInt(StoredParts):
    """Integers that a checkpoint stores packed, with scales and maybe zero points.

    4 bits are kept as `Int4Weights`, 8 bits as `Int8Weights` if a row has one scale and no zero point, and
    others, for which there is no product, as floats.

    Where inputs of 4 bits were quantized in the order of their activations, the inputs of a group are
    scattered. The weight's columns are then sorted by group, and those of x are gathered in that order.
    """

    def __init__(
        self,
        modules: Sequence[str],
        shape: LinearShape,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
        packing: Packing,
    ) -> None:
        super().__init__(modules, shape, _kept(modules, shape, dtype, device, shard, packing))
        self.packing = packing
        self._dtype = dtype
        self._scale_dtype: torch.dtype | None = None  # of the outputs that have come
        self._order: Tensor | None = None  # of the inputs by group, int64 [in_features]
        self._is_scattered = False  # the order is another than the inputs' own
        self._keeps_order = bool(shape.num_experts) or (shape.shard == "row" and shard.world > 1)
        if isinstance(self._kept, DenseWeights):
            name = str(dtype).removeprefix("torch.")
            self.fallback = (
                f"there is no product for {packing.bits} bits in groups or with zero points: "
                f"they are kept in {name}"
            )

    @abstractmethod
    def _unpack(self, parts: Mapping[str, Tensor]) -> Codes:
        """Return what the tensors of one output hold."""

    @property
    def num_groups(self) -> int:
        """Groups of a row of the whole weight; the last may have fewer inputs than others."""
        return -(-self._in_features // self.packing.group_size)

    def _convert(self, name: str, parts: Mapping[str, Tensor]) -> None:
        found = self._unpack(parts)
        if not found.codes.is_meta:
            self._check(name, found)
        if isinstance(self._kept, Int4Weights):
            codes = self._by_group(found.codes, found.order)
            self._kept.fill_codes(name, codes, found.scales, found.zeros)
        elif isinstance(self._kept, Int8Weights):
            values = (found.codes ^ _ZERO_OF_INT8).view(torch.int8)
            self._kept.fill_values(name, values, found.scales.squeeze(1))
        else:
            self._fill_floats(name, self._dequantize(found))

    def _groups(self, found: Codes) -> Tensor:
        """Return the group of each input, int64 [in_features]."""
        if found.order is not None:
            return found.order.long()
        return torch.arange(self._in_features, device=found.codes.device) // self.packing.group_size

    def _zeros(self, found: Codes, groups: Tensor) -> Tensor | int:
        """Return the zero point of each code, or the one of all."""
        return 1 << self.packing.bits - 1 if found.zeros is None else found.zeros[:, groups]

    def _dequantize(self, found: Codes) -> Tensor:
        """Return the values of codes, fp32 [n, in_features]."""
        groups = self._groups(found)
        return (found.codes.float() - self._zeros(found, groups)) * found.scales[:, groups].float()

    def _by_group(self, codes: Tensor, order: Tensor | None) -> Tensor:
        """Return codes [n, in_features] with the inputs of a group together.

        Raises ModelError if the groups are not of one size, or other than those of the outputs before.
        """
        if order is None or codes.is_meta:
            return codes
        expected = torch.arange(len(order), device=order.device) // self.packing.group_size
        found, inputs = order.long().sort(stable=True)
        if not torch.equal(found, expected):
            raise self._error(f"g_idx has not {self.packing.group_size} inputs in each group")
        if self._order is not None and not torch.equal(inputs, self._order):
            raise self._error("the outputs have different orders of inputs, and are one product here")
        self._order = inputs
        self._is_scattered = not torch.equal(order.long(), expected)
        if self._is_scattered and self._keeps_order:
            raise self._error(
                "inputs in the order of activations (desc_act) are not supported for experts, nor if ranks "
                "divide the inputs"
            )
        return codes[:, inputs] if self._is_scattered else codes

    def _check(self, name: str, found: Codes) -> None:
        """Raise ModelError for scales that are not finite, or 0 in a group of other weights than 0."""
        of = f" of '{name}'" if name else ""
        if found.order is not None and not (found.order.min() >= 0 and found.order.max() < self.num_groups):
            raise self._error(f"g_idx{of} has groups that are none of the {self.num_groups}")
        if not found.scales.isfinite().all():
            raise self._error(f"scales{of} are not finite")
        if (found.scales == 0).any():
            groups = self._groups(found)
            differs = found.codes != self._zeros(found, groups)
            if (differs & (found.scales == 0)[:, groups]).any():
                raise self._error(f"a scale{of} is 0 in a group whose weights are not")

    def _check_dtype(self, parameter: str, kind: str, dtype: torch.dtype) -> None:
        """Raise ModelError for scales, packed integers and other integers of another dtype, or of several."""
        if "scale" in kind:
            if dtype not in _SCALE_DTYPES:
                raise self._error(f"{parameter} holds {dtype}, and scales are floats of 16 or 32 bits")
            if dtype != (self._scale_dtype or dtype):
                raise self._error(f"{parameter} holds {dtype}, and other scales {self._scale_dtype}")
            self._scale_dtype = dtype
        elif kind.endswith(("g_idx", "shape")):
            if dtype not in (torch.int32, torch.int64):
                raise self._error(f"{parameter} holds {dtype}, and not int32 or int64")
        elif dtype != torch.int32:
            raise self._error(f"{parameter} holds {dtype}, and {self.packing.bits} bits are packed in int32")

    def random(self, parameter: str, generator: torch.Generator) -> Tensor:
        kind = parameter.rpartition(".")[2]
        if kind == "bias":
            return super().random(parameter, generator)
        shape, device = self.parameters()[parameter], generator.device
        if kind.endswith("g_idx"):
            return (
                torch.arange(self._in_features, dtype=torch.int32, device=device) // self.packing.group_size
            )
        if "scale" in kind:
            deviation = 2**self.packing.bits / 12**0.5  # of codes
            return torch.full(shape, self._in_features**-0.5 / deviation, dtype=self._dtype, device=device)
        if "zero" in kind:  # eight codes of 8, or four of 128
            code = -0x77777778 if self.packing.bits == 4 else -0x7F7F7F80
            return torch.full(shape, code, dtype=torch.int32, device=device)
        limit = 1 << 31
        return torch.randint(-limit, limit, shape, dtype=torch.int32, device=device, generator=generator)

    def matmul(self, x: Tensor) -> Tensor:
        if self._is_scattered:
            assert self._order is not None
            x = x.index_select(1, self._order)
        return super().matmul(x)


def _kept(
    modules: Sequence[str],
    shape: LinearShape,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
    packing: Packing,
) -> UnquantizedWeights:
    """Return the weights that keep what a packing stores. Raises ModelError for odd groups of inputs."""
    if packing.bits == 4:
        try:
            return Int4Weights(shape, dtype, device, shard, packing.group_size)
        except ModelError as error:
            raise ModelError(f"{', '.join(modules)}: {error}") from None
    if packing.group_size == shape.in_features and not packing.has_zeros:
        return Int8Weights(shape, dtype, device, shard)
    return DenseWeights(shape, dtype, device, shard)


def packing_of(
    options: Mapping[str, Any], method: str, in_features: int, allowed: Sequence[int] = (4, 8)
) -> Packing:
    """Return the packing by `bits` and `group_size`, of which -1 means all inputs. Raises ModelError."""
    bits, size = options.get("bits"), options.get("group_size", -1)
    if type(bits) is not int or bits not in allowed:
        known = " and ".join(str(number) for number in allowed)
        raise ModelError(f"{method} with {bits!r} bits is not supported; {known} bits are")
    if type(size) is not int or (size < 1 and size != -1):
        raise ModelError(f"{method}: group_size {size!r} makes no sense")
    return Packing(bits, in_features if size == -1 else min(size, in_features))


def one_packing(modules: Sequence[str], packings: Iterable[Packing]) -> Packing:
    """Return the packing of all modules that fill one linear. Raises ModelError if there are several."""
    first, *others = set(packings)
    if others:
        raise ModelError(f"{', '.join(modules)} have different bits or group sizes, and are one product here")
    return first
