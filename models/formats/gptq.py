"""GPTQ checkpoints (Frantar et al., 2022): integers of 4 or 8 bits with zero points, packed along inputs.

With n = 32 / bits: qweight int32 [in_features / n, out_features], qzeros int32 [groups, out_features / n],
scales [groups, out_features], g_idx int32 [in_features], the group of each input. Version 1
(checkpoint_format `gptq`) stores zero points less one, modulo 2 ** bits; version 2 (`gptq_v2`) as they are.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from models.errors import ModelError
from models.formats.base import LinearShape, LinearWeights, MakeStored, Shard
from models.formats.dense import DenseWeights
from models.formats.stored_int import Codes, StoredInt, one_packing, packing_of
from models.weight_names import all_or_none, is_in_layer

_VERSIONS = {"gptq": 1, "gptq_v2": 0}  # what is added to stored zero points


def stored(
    quantization: Mapping[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard
) -> MakeStored:
    """Return a maker of linears: GPTQ, but for the modules that the configuration leaves out."""
    version = str(quantization.get("checkpoint_format") or "gptq").lower()
    version = "marlin" if quantization.get("is_marlin_format") else version
    if version not in _VERSIONS:
        raise ModelError(
            f"GPTQ of checkpoint_format '{version}' is not supported; {', '.join(_VERSIONS)} are"
        )

    def make_linear(modules: Sequence[str], shape: LinearShape) -> LinearWeights:
        options = [_options(module, quantization) for module in modules]
        is_head = not is_in_layer(modules) and not quantization.get("lm_head")
        if is_head or all_or_none(modules, [found is None for found in options]):
            return DenseWeights(shape, dtype, device, shard)
        packings = (packing_of(found or {}, "GPTQ", shape.in_features) for found in options)
        packing = one_packing(modules, packings)
        packing = replace(packing, has_order=True, zero_offset=_VERSIONS[version])
        return GptqWeights(modules, shape, dtype, device, shard, packing)

    return make_linear


def _options(module: str, quantization: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the options of a module, None if it is not quantized.

    `dynamic` has patterns of names: `-:` leaves modules out, `+:` or nothing before one overrides options.
    """
    only = quantization.get("modules_in_block_to_quantize")
    if only:
        groups = only if isinstance(only, list) else [only]
        names = [name for group in groups for name in (group if isinstance(group, list) else [group])]
        if not all(isinstance(name, str) for name in names):
            raise ModelError(f"GPTQ: modules_in_block_to_quantize has other values than names: {only!r}")
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
            return None if kind == "-" else {**quantization, **(changes or {})}
    return quantization


class GptqWeights(StoredInt):
    """Weights filled from qweight, qzeros and scales, and from g_idx if it is stored."""

    def _stored(self, out_features: int) -> dict[str, tuple[int, ...]]:
        per_int32 = self.packing.per_int32
        if out_features % per_int32 or self._in_features % per_int32:
            raise self._error(
                f"{out_features} outputs and {self._in_features} inputs cannot be GPTQ, which packs "
                f"{per_int32} of both"
            )
        found: dict[str, tuple[int, ...]] = {
            "qweight": (self._in_features // per_int32, out_features),
            "qzeros": (self.num_groups, out_features // per_int32),
            "scales": (self.num_groups, out_features),
        }
        if self.packing.has_order:
            found["g_idx"] = (self._in_features,)
        return found

    def _unpack(self, parts: Mapping[str, Tensor]) -> Codes:
        codes, zeros = self.packing.unpack(parts["qweight"].t()), self.packing.unpack_zeros(parts["qzeros"])
        return Codes(codes, parts["scales"].t(), zeros.t(), parts.get("g_idx"))
