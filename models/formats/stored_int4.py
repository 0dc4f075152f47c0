"""Base of formats whose checkpoints store int4 weights, and how they pack four bits into int32."""

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from models.errors import ModelError
from models.formats.base import LinearShape, Shard
from models.formats.int4 import Int4Weights

PER_INT32 = 8
_SYMMETRIC_ZERO = 8
_LAYER = re.compile(r"\.\d+\.")


class StoredInt4(Int4Weights):
    """Int4 weights whose tensors a checkpoint stores packed, an output in several tensors.

    It is converted when all of them have come. `modules` are the checkpoint's names, for messages.

    Where inputs were quantized in the order of their activations, the inputs of a group are scattered. The
    weight's columns are then sorted by group, and those of x are gathered in that order.
    """

    def __init__(
        self,
        modules: Sequence[str],
        shape: LinearShape,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
        group_size: int,
    ) -> None:
        self.modules = modules
        self._parts: dict[str, dict[str, Tensor]] = {}
        try:
            super().__init__(shape, dtype, device, shard, group_size)
        except ModelError as error:
            raise self._error(str(error)) from None
        self._in_features = shape.in_features
        self._order: Tensor | None = None  # of the inputs by group, int64 [in_features]
        self._is_scattered = False  # the order is another than the inputs' own
        self._keeps_order = bool(shape.num_experts) or (shape.shard == "row" and shard.world > 1)

    @abstractmethod
    def _stored(self, out_features: int) -> dict[str, tuple[int, ...]]:
        """Return the tensors of one output: name, such as `qweight`, -> shape. Raises ModelError."""

    @abstractmethod
    def _unpack(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return codes uint8 [n, in_features], scales [n, groups] and zeros uint8 of that shape, or None."""

    @property
    def num_groups(self) -> int:
        """Groups of a row of the whole weight; the last may have fewer inputs than others."""
        return -(-self._in_features // self.stored_group_size)

    def parameters(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in super().parameters().items():
            prefix = name.removesuffix("weight")
            if prefix == name:
                found[name] = shape
            else:
                found |= {f"{prefix}{kind}": stored for kind, stored in self._stored(shape[0]).items()}
        return found

    def fill(self, parameter: str, tensor: Tensor) -> None:
        name, _, kind = parameter.rpartition(".")
        if kind == "bias":
            super().fill(parameter, tensor)
            return
        parts = self._parts.setdefault(name, {})
        parts[kind] = tensor
        if parts.keys() == self._stored(0).keys():
            del self._parts[name]
            rows, first = self._rows[name]
            codes, scales, zeros = self._unpack(parts)
            codes, scales = codes[rows], scales[rows]
            zeros = None if zeros is None else zeros[rows]
            if not codes.is_meta:
                self._check(name, codes, scales, zeros)
            self._store(first, codes, scales, zeros)

    def _by_group(self, codes: Tensor, groups: Tensor) -> Tensor:
        """Return codes [n, in_features] with the inputs of a group together, groups int [in_features].

        Raises ModelError if the groups are not of one size, or other than those of the outputs before.
        """
        if codes.is_meta:
            return codes
        expected = torch.arange(len(groups), device=groups.device) // self.stored_group_size
        found, order = groups.long().sort(stable=True)
        if not torch.equal(found, expected):
            raise self._error(f"g_idx has not {self.stored_group_size} inputs in each group")
        if self._order is not None and not torch.equal(order, self._order):
            raise self._error("the outputs have different orders of inputs, and are one product here")
        self._order = order
        self._is_scattered = not torch.equal(groups.long(), expected)
        if self._is_scattered and self._keeps_order:
            raise self._error(
                "inputs in the order of activations (desc_act) are not supported for experts, nor if ranks "
                "divide the inputs"
            )
        return codes[:, order] if self._is_scattered else codes

    def matmul(self, x: Tensor) -> Tensor:
        if self._is_scattered:
            assert self._order is not None
            x = x.index_select(1, self._order)
        return super().matmul(x)

    def _check(self, name: str, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> None:
        """Raise ModelError for scales that are not finite, or 0 in a group of other weights than 0."""
        if not scales.isfinite().all():
            raise self._error(f"scales of '{name}' are not finite" if name else "scales are not finite")
        empty = scales == 0
        if empty.any():
            zero = _SYMMETRIC_ZERO if zeros is None else zeros.repeat_interleave(self.stored_group_size, 1)
            differs = codes != (zero if isinstance(zero, int) else zero[:, : codes.shape[1]])
            of_groups = empty.repeat_interleave(self.stored_group_size, 1)[:, : codes.shape[1]]
            if (differs & of_groups).any():
                raise self._error("a scale is 0 in a group whose weights are not")

    def _error(self, message: str) -> ModelError:
        return ModelError(f"{', '.join(self.modules)}: {message}")

    def random(self, parameter: str, generator: torch.Generator) -> Tensor:
        kind = parameter.rpartition(".")[2]
        shape, device = self.parameters()[parameter], generator.device
        if kind == "bias":
            return super().random(parameter, generator)
        if kind.endswith("g_idx"):
            return torch.arange(self._in_features, dtype=torch.int32, device=device) // self.stored_group_size
        if "scale" in kind:  # 4.6 is the deviation of codes
            return torch.full(shape, self._in_features**-0.5 / 4.6, dtype=self._dtype, device=device)
        if "zero" in kind:
            return torch.full(shape, -0x77777778, dtype=torch.int32, device=device)  # eight codes of 8
        limit = 1 << 31
        return torch.randint(-limit, limit, shape, dtype=torch.int32, device=device, generator=generator)


def unpack(packed: Tensor) -> Tensor:
    """Return the codes uint8 [n, 8 * m] of int32 [n, m], the lowest bits first. Raises ModelError."""
    if packed.dtype != torch.int32:
        raise ModelError(f"four bits are packed in int32, and a tensor has {packed.dtype}")
    both = packed.contiguous().view(torch.uint8)
    return torch.stack((both & 15, both >> 4), -1).flatten(1)


def group_size_of(options: Mapping[str, Any], method: str, in_features: int) -> int:
    """Return the inputs of a group; -1 means all. Raises ModelError for other bits than 4."""
    bits, size = options.get("bits"), options.get("group_size", -1)
    if bits != 4:
        raise ModelError(f"{method} with {bits!r} bits is not supported; 4 bits are")
    if type(size) is not int or (size < 1 and size != -1):
        raise ModelError(f"{method}: group_size {size!r} makes no sense")
    return in_features if size == -1 else size


def is_in_layer(modules: Sequence[str]) -> bool:
    """Return True for modules of a layer, False for an output head."""
    return all(_LAYER.search(module) for module in modules)
