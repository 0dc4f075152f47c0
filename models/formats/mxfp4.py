"""MXFP4 experts as gpt-oss checkpoints store them, kept packed (OCP Microscaling Formats, v1.0).

32 values of a row share one byte, the exponent of their scale (E8M0), and are FP4 (E2M1), two in a byte.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from models.formats.base import LinearShape, LinearWeights, MakeStored, Shard
from models.formats.dense import DenseWeights
from models.formats.int4 import Int4Weights
from models.formats.stored_parts import StoredParts

_BLOCK = 32
_EXPONENT_BIAS = 127
_LARGEST = 252  # exponent with which all values, up to 6, are floats; 255 is no number


def stored(
    quantization: Mapping[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard
) -> MakeStored:
    """Return a maker of linears: experts are MXFP4, all others dense."""

    def make_linear(modules: Sequence[str], shape: LinearShape) -> LinearWeights:
        if not shape.num_experts:
            return DenseWeights(shape, dtype, device, shard)
        return Mxfp4Weights(modules, shape, dtype, device, shard)

    return make_linear


class Mxfp4Weights(StoredParts):
    """FP4 codes in tiles, filled from blocks and scales; scales are bfloat16, which has all powers of two."""

    def __init__(
        self,
        modules: Sequence[str],
        shape: LinearShape,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
    ) -> None:
        self._codes = Int4Weights(shape, dtype, device, shard, _BLOCK, codes_are_floats=True)
        super().__init__(modules, shape, self._codes)
        if shape.in_features % _BLOCK:
            raise self._error(f"rows of {shape.in_features} weights have no whole MXFP4 blocks of {_BLOCK}")

    def _stored(self, out_features: int) -> dict[str, tuple[int, ...]]:
        num_blocks = self._in_features // _BLOCK
        return {
            "blocks": (out_features, num_blocks, _BLOCK // 2),
            "scales": (out_features, num_blocks),
        }

    def _check_dtype(self, parameter: str, kind: str, dtype: torch.dtype) -> None:
        if dtype != torch.uint8:
            raise self._error(f"{parameter} holds {dtype}, and MXFP4 is bytes")

    def _convert(self, name: str, parts: Mapping[str, Tensor]) -> None:
        blocks, exponents = parts["blocks"], parts["scales"]
        if not exponents.is_meta and (exponents > _LARGEST).any():
            raise self._error(f"a scale of '{name}' is not a number, or beyond floats")
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
        powers = exponents.int() - _EXPONENT_BIAS
        scales = torch.ldexp(torch.ones(powers.shape, device=powers.device), powers)
        self._codes.fill_codes(name, codes, scales.to(torch.bfloat16))

    def random(self, parameter: str, generator: torch.Generator) -> Tensor:
        kind = parameter.rpartition(".")[2]
        if kind == "bias":
            return super().random(parameter, generator)
        shape = self.parameters()[parameter]
        if kind == "scales":  # 2 ** -1 is near the reciprocal of the values' deviation of 2.9 and more
            exponent = round(-1.5 - 0.5 * math.log2(self._in_features))
            return torch.full(shape, _EXPONENT_BIAS + exponent, dtype=torch.uint8, device=generator.device)
        return torch.randint(256, shape, dtype=torch.uint8, device=generator.device, generator=generator)
