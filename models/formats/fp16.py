"""Weights in float16 for CPUs: FBGEMM widens them in registers and multiplies in float32.

A row's result does not depend on the rows beside it. Weights beyond 65,504 are refused. All products of a
SmolLM2-135M step on two cores of an AMD EPYC (Zen 5) take 8.5 and 15.3 ms at 1 and 16 rows; those of float32
32 and 49, of bfloat16 11.5 and 16.1 (`F.linear`).
"""

import torch
from torch import Tensor

from kernels.expert_routing import ExpertGroups
from kernels.grouped_linear import GatedActivation
from models.errors import ModelError
from models.formats.base import LinearShape, LinearWeights, MakeLinear, Shard, UnquantizedWeights
from models.formats.dense import DenseWeights


def conversion(dtype: torch.dtype, device: torch.device, shard: Shard) -> MakeLinear:
    """Return a maker of linears in float16; those of experts stay dense. Raises ModelError without FBGEMM."""
    if device.type == "cuda":
        raise ModelError("quantization 'fp16' is for CPUs; on a GPU use --dtype float16")
    if "fbgemm" not in _engines():
        raise ModelError("quantization 'fp16' needs an x86 CPU with AVX2, whose products are FBGEMM's")

    def make_linear(address: str, shape: LinearShape) -> LinearWeights:
        if not shape.num_experts:
            return HalfWeights(address, shape, dtype, device, shard)
        experts = DenseWeights(shape, dtype, device, shard)
        experts.fallback = f"experts have no product with float16, so that they stay in {dtype}"
        return experts

    return make_linear


def _engines() -> list[str]:
    engines: list[str] = torch.backends.quantized.supported_engines
    return engines


class HalfWeights(UnquantizedWeights):
    """The rows in float16, in FBGEMM's layout."""

    def __init__(
        self, address: str, shape: LinearShape, dtype: torch.dtype, device: torch.device, shard: Shard
    ) -> None:
        """`address` names the linear in errors."""
        super().__init__(shape, dtype, device, shard)
        self._address = address
        self._filling: Tensor | None = None  # fp16 [out_features, in_features], until the last is filled
        self._num_filled = 0
        self._packed: torch.ScriptObject | None = None

    def _fill_rows(self, first: int, rows: Tensor) -> None:
        if self._filling is None:
            size = (self.out_features, self.in_features)
            self._filling = torch.empty(size, dtype=torch.float16, device=self._device)
        kept = rows[:, self._columns].half()
        if not kept.is_meta and kept.isinf().any():
            raise ModelError(
                f"{self._address} has weights beyond 65,504, the largest number of float16: "
                "use --quantization dense or int8"
            )
        self._filling[first : first + len(kept)] = kept
        self._num_filled += 1
        if self._num_filled == len(self._rows) and not self._filling.is_meta:
            self._packed = torch.ops.quantized.linear_prepack_fp16(self._filling.float(), None)
            self._filling = None

    def matmul(self, x: Tensor) -> Tensor:
        assert self._packed is not None, "multiplied before its weights were loaded"
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float(), self._packed)
        if self._bias is not None:
            out += self._bias
        return out.to(x.dtype)

    def grouped_matmul(
        self, x: Tensor, groups: ExpertGroups, activation: GatedActivation | None = None
    ) -> Tensor:
        raise AssertionError("conversion() keeps experts dense")
