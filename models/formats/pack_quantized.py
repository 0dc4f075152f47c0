"""Weights of compressed-tensors in the format `pack-quantized`: integers of 4 or 8 bits in an int32.

With n = 32 / bits: weight_packed int32 [out_features, in_features / n], weight_scale [out_features, groups],
weight_shape [2], weight_zero_point int32 [out_features / n, groups] of asymmetric weights, weight_g_idx int32
[in_features] if groups follow the order of activations. Codes and zero points are stored plus half of their
range; sizes are rounded up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from models.errors import ModelError
from models.formats.base import LinearShape, MakeStored, Shard
from models.formats.stored_int import Codes, StoredInt, packing_of

_STRATEGIES = ("group", "channel")
_ORDERS = (None, "group", "dynamic", "static", "weight")  # the first two after None store weight_g_idx


def scheme(args: Mapping[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard) -> MakeStored:
    """Return a maker of linears whose weights have these QuantizationArgs. Raises ModelError for others."""
    if args.get("type", "int") != "int":
        raise ModelError(f"pack-quantized weights of type {args['type']!r} are not supported; 'int' is")
    strategy, order = args.get("strategy") or "group", args.get("actorder") or None
    if strategy not in _STRATEGIES:
        known = " and ".join(_STRATEGIES)
        raise ModelError(f"pack-quantized: the strategy {strategy!r} is not supported; {known} are")
    if order not in _ORDERS:
        raise ModelError(f"pack-quantized: the order of activations {order!r} is not known")
    options = {"bits": args.get("num_bits")}
    options["group_size"] = args.get("group_size") if strategy == "group" else -1

    def make_linear(modules: Sequence[str], shape: LinearShape) -> PackQuantizedWeights:
        packing = replace(
            packing_of(options, "pack-quantized", shape.in_features),
            has_zeros=args.get("symmetric", True) is False,
            has_order=order in ("group", "dynamic"),
        )
        return PackQuantizedWeights(modules, shape, dtype, device, shard, packing)

    return make_linear


class PackQuantizedWeights(StoredInt):
    """Weights filled from weight_packed, weight_scale, weight_shape and what more there is."""

    def _stored(self, out_features: int) -> dict[str, tuple[int, ...]]:
        per_int32 = self.packing.per_int32
        found = {
            "weight_packed": (out_features, -(-self._in_features // per_int32)),
            "weight_scale": (out_features, self.num_groups),
            "weight_shape": (2,),
        }
        if self.packing.has_zeros:
            found["weight_zero_point"] = (-(-out_features // per_int32), self.num_groups)
        if self.packing.has_order:
            found["weight_g_idx"] = (self._in_features,)
        return found

    def _unpack(self, parts: Mapping[str, Tensor]) -> Codes:
        shape, zeros = parts["weight_shape"], None
        # Of a tensor packed from several outputs the rows are those of all.
        if not shape.is_meta and shape.tolist()[1] != self._in_features:
            raise self._error(f"weight_shape is {shape.tolist()}, and there are {self._in_features} inputs")
        codes = self.packing.unpack(parts["weight_packed"])[:, : self._in_features]
        if self.packing.has_zeros:
            zeros = self.packing.unpack_zeros(parts["weight_zero_point"].t()).t()[: len(codes)]
        return Codes(codes, parts["weight_scale"], zeros, parts.get("weight_g_idx"))

    def random(self, parameter: str, generator: torch.Generator) -> Tensor:
        if parameter.endswith("weight_shape"):
            name = parameter.removesuffix("_shape").rpartition("weight")[0]
            rows = self.parameters()[f"{name}weight_packed"][0]
            return torch.tensor([rows, self._in_features], device=generator.device)
        return super().random(parameter, generator)
