"""GPTQ checkpoints (Frantar et al., 2022): int4, eight inputs in an int32, with or without zero points.

qweight int32 [in_features / 8, out_features], qzeros int32 [groups, out_features / 8], scales [groups,
out_features], g_idx int32 [in_features], the group of each input. Version 1 (checkpoint_format `gptq`) stores
zero points less one, modulo 16; version 2 (`gptq_v2`) as they are.
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
        return self._by_group(codes, parts["g_idx"]), parts["scales"].t(), zeros
