"""GPTQ checkpoints (Frantar et al., 2022): int4, eight inputs in an int32, with or without zero points.

qweight int32 [in_features / 8, out_features], qzeros int32 [groups, out_features / 8], scales [groups,
out_features], g_idx int32 [in_features], the group of each input. Version 1 (checkpoint_format `gptq`) stores
zero points less one, modulo 16; version 2 (`gptq_v2`) as they are.

Where inputs were quantized in the order of their activations (desc_act), the inputs of a group are scattered.
The weight's columns are then sorted by group, and those of x are gathered in that order.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from models.errors import ModelError
from models.formats.base import LinearShape, LinearWeights, MakeStored, Shard
from models.formats.dense import DenseWeights
from models.formats.stored_int4 import PER_INT32, StoredInt4, group_size_of, is_in_layer, unpack
from models.weight_names import all_or_none

_VERSIONS = {"gptq": 1, "gptq_v2": 0}  # what is added to stored zero points


def stored(
    quantization: Mapping[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard
) -> MakeStored:
    """Return a maker of linears: GPTQ, but for the modules that the configuration leaves out."""
    version = str(quantization.get("checkpoint_format") or "gptq").lower()
    if version not in _VERSIONS:
        raise ModelError(
            f"GPTQ of checkpoint_format '{version}' is not supported; {', '.join(_VERSIONS)} are"
        )

    def make_linear(modules: Sequence[str], shape: LinearShape) -> LinearWeights:
        options = [_options(module, quantization) for module in modules]
        is_head = not is_in_layer(modules) and not quantization.get("lm_head")
        if is_head or all_or_none(modules, [found is None for found in options]):
            return DenseWeights(shape, dtype, device, shard)
        sizes = {group_size_of(found or {}, "GPTQ", shape.in_features) for found in options}
        if len(sizes) > 1:
            raise ModelError(f"{', '.join(modules)} have different group sizes, and are one product here")
        return GptqWeights(modules, shape, dtype, device, shard, sizes.pop(), _VERSIONS[version])

    return make_linear


def _options(module: str, quantization: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the options of a module, None if it is not quantized.

    `dynamic` has patterns of names: `-:` leaves modules out, `+:` or nothing before one overrides options.
    """
    only = quantization.get("modules_in_block_to_quantize")
    if only:
        names = [name for group in only for name in ([group] if isinstance(group, str) else group)]
        if not any(f".{module}".endswith(f".{name}") for name in names):
            return None
    for pattern, changes in (quantization.get("dynamic") or {}).items():
        kind, separator, expression = pattern.partition(":")
        if not separator or kind not in ("+", "-"):
            kind, expression = "+", pattern
        try:
            matches = re.match(expression, module)
        except re.error as error:
            raise ModelError(f"GPTQ: {pattern!r} in `dynamic` is no pattern: {error}") from None
        if matches:
            return None if kind == "-" else {**quantization, **changes}
    return quantization


class GptqWeights(StoredInt4):
    """Weights filled from qweight, qzeros, scales and g_idx."""

    def __init__(
        self,
        modules: Sequence[str],
        shape: LinearShape,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
        group_size: int,
        zero_offset: int,
    ) -> None:
        super().__init__(modules, shape, dtype, device, shard, group_size)
        self._zero_offset = zero_offset
        self._order: Tensor | None = None  # of the inputs by group, int64 [in_features]
        self._is_scattered = False  # the order is another than the inputs' own
        self._keeps_order = bool(shape.num_experts) or (shape.shard == "row" and shard.world > 1)

    def _stored(self, out_features: int) -> dict[str, tuple[int, ...]]:
        if out_features % PER_INT32 or self._in_features % PER_INT32:
            raise self._error(
                f"{out_features} outputs and {self._in_features} inputs cannot be GPTQ, which packs "
                f"{PER_INT32} of both"
            )
        return {
            "qweight": (self._in_features // PER_INT32, out_features),
            "qzeros": (self.num_groups, out_features // PER_INT32),
            "scales": (self.num_groups, out_features),
            "g_idx": (self._in_features,),
        }

    def _unpack(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        codes = unpack(parts["qweight"].t())
        zeros = (unpack(parts["qzeros"]) + self._zero_offset & 15).t()
        if not codes.is_meta:
            codes = self._sorted(codes, parts["g_idx"])
        return codes, parts["scales"].t(), zeros

    def _sorted(self, codes: Tensor, groups: Tensor) -> Tensor:
        """Return codes [n, in_features] with the inputs of a group together. Raises ModelError."""
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

    def random(self, parameter: str, generator: torch.Generator) -> Tensor:
        if parameter.endswith("g_idx"):
            inputs = torch.arange(self._in_features, dtype=torch.int32, device=generator.device)
            return inputs // self.stored_group_size
        return super().random(parameter, generator)
