"""AWQ checkpoints (Lin et al., 2023), version GEMM: int4 with zero points, eight outputs in an int32.

qweight int32 [in_features, out_features / 8], qzeros int32 [groups, out_features / 8], scales [groups,
out_features]. The four bits i of an int32 belong to output (0, 2, 4, 6, 1, 3, 5, 7)[i] of eight.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from models.errors import ModelError
from models.formats.base import LinearShape, LinearWeights, MakeStored, Shard
from models.formats.dense import DenseWeights
from models.formats.stored_int import Codes, StoredInt, packing_of
from models.weight_names import is_in_layer

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of each output's bits


def stored(
    quantization: Mapping[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard
) -> MakeStored:
    """Return a maker of linears: those of layers are AWQ, and an output head if the configuration says so."""
    version = str(quantization.get("version") or quantization.get("checkpoint_format") or "gemm").lower()
    if version != "gemm":
        raise ModelError(f"AWQ of version '{version}' is not supported; 'gemm' is")
    if quantization.get("zero_point") is False:
        raise ModelError("AWQ without zero points is not supported")
    options = {"bits": quantization.get("bits", quantization.get("w_bit"))}
    options["group_size"] = quantization.get("group_size", quantization.get("q_group_size", 128))

    def make_linear(modules: Sequence[str], shape: LinearShape) -> LinearWeights:
        if not is_in_layer(modules) and not quantization.get("lm_head"):
            return DenseWeights(shape, dtype, device, shard)
        packing = packing_of(options, "AWQ", shape.in_features, allowed=(4,))
        return AwqWeights(modules, shape, dtype, device, shard, packing)

    return make_linear


class AwqWeights(StoredInt):
    """Weights filled from qweight, qzeros and scales."""

    def _stored(self, out_features: int) -> dict[str, tuple[int, ...]]:
        per_int32, group_size = self.packing.per_int32, self.packing.group_size
        if out_features % per_int32 or self._in_features % group_size:
            raise self._error(
                f"{out_features} outputs and {self._in_features} inputs cannot be AWQ, which packs "
                f"{per_int32} outputs and groups {group_size} inputs"
            )
        return {
            "qweight": (self._in_features, out_features // per_int32),
            "qzeros": (self.num_groups, out_features // per_int32),
            "scales": (self.num_groups, out_features),
        }

    def _unpack(self, parts: Mapping[str, Tensor]) -> Codes:
        codes, zeros = (_in_order(self.packing.unpack(parts[kind])).t() for kind in ("qweight", "qzeros"))
        return Codes(codes, parts["scales"].t(), zeros)


def _in_order(codes: Tensor) -> Tensor:
    """Return codes [n, out_features] by output."""
    return codes.view(len(codes), -1, len(_PLACES))[:, :, list(_PLACES)].flatten(1)
