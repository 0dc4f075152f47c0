"""Weights of compressed-tensors in the format `pack-quantized`, of four bits: eight inputs in an int32.

weight_packed int32 [out_features, in_features / 8], weight_scale [out_features, groups], weight_shape [2],
weight_zero_point int32 [out_features / 8, groups] of asymmetric weights, weight_g_idx int32 [in_features] if
groups follow the order of activations. Codes and zero points are stored plus 8; sizes are rounded up.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from models.errors import ModelError
from models.formats.base import LinearShape, MakeStored, Shard
from models.formats.stored_int4 import PER_INT32, StoredInt4, group_size_of, unpack

_STRATEGIES = ("group", "channel")
_ORDERS = (None, "group", "dynamic", "static", "weight")  # the first two after None store weight_g_idx


def scheme(args: Mapping[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard) -> MakeStored:
    """Return a maker of linears whose weights have these QuantizationArgs. Raises ModelError for others."""
    if args.get("type", "int") != "int":
        raise ModelError(f"pack-quantized weights of type {args['type']!r} are not supported; 'int' is")
    strategy, order = args.get("strategy") or "group", args.get("actorder") or None
    if strategy not in _STRATEGIES:
        raise ModelError(f"pack-quantized: the strategy {strategy!r} is not supported; {_STRATEGIES} are")
    if order not in _ORDERS:
        raise ModelError(f"pack-quantized: the order of activations {order!r} is not known")
    options = {"bits": args.get("num_bits")}
    options["group_size"] = args.get("group_size") if strategy == "group" else -1

    def make_linear(modules: Sequence[str], shape: LinearShape) -> PackQuantizedWeights:
        group_size = group_size_of(options, "pack-quantized", shape.in_features)
        weights = PackQuantizedWeights(modules, shape, dtype, device, shard, group_size)
        weights.has_zeros = args.get("symmetric", True) is False
        weights.has_groups = order in ("group", "dynamic")
        return weights

    return make_linear


class PackQuantizedWeights(StoredInt4):
    """Weights filled from weight_packed, weight_scale, weight_shape and what more there is."""

    has_zeros = False
    has_groups = False

    def _stored(self, out_features: int) -> dict[str, tuple[int, ...]]:
        found = {
            "weight_packed": (out_features, -(-self._in_features // PER_INT32)),
            "weight_scale": (out_features, self.num_groups),
            "weight_shape": (2,),
        }
        if self.has_zeros:
            found["weight_zero_point"] = (-(-out_features // PER_INT32), self.num_groups)
        if self.has_groups:
            found["weight_g_idx"] = (self._in_features,)
        return found

    def _unpack(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        codes, scales, shape = unpack(parts["weight_packed"]), parts["weight_scale"], parts["weight_shape"]
        # Of a tensor packed from several outputs the rows are those of all.
        if not shape.is_meta and shape.tolist()[1] != self._in_features:
            raise self._error(f"weight_shape is {shape.tolist()}, and there are {self._in_features} inputs")
        codes, zeros = codes[:, : self._in_features], None
        if self.has_zeros:
            zeros = unpack(parts["weight_zero_point"].t()).t()[: len(codes)]
        if self.has_groups:
            codes = self._by_group(codes, parts["weight_g_idx"])
        return codes, scales, zeros

    def random(self, parameter: str, generator: torch.Generator) -> Tensor:
        if parameter.endswith("weight_shape"):
            name = parameter.removesuffix("_shape").rpartition("weight")[0]
            rows = self.parameters()[f"{name}weight_packed"][0]
            return torch.tensor([rows, self._in_features], device=generator.device)
        return super().random(parameter, generator)
