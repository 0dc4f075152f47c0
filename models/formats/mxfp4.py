"""MXFP4 experts as gpt-oss checkpoints store them, kept packed (OCP Microscaling Formats, v1.0).

32 values of a row share one byte, the exponent of their scale (E8M0), and are FP4 (E2M1), two in a byte.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from models.errors import ModelError
from models.formats.base import LinearShape, LinearWeights, MakeStored, Shard
from models.formats.dense import DenseWeights
from models.formats.int4 import Int4Weights

_BLOCK = 32
_EXPONENT_BIAS = 127
_NAN = 255  # as an exponent


def stored(
    quantization: Mapping[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard
) -> MakeStored:
    """Return a maker of linears: experts are MXFP4, all others dense."""

    def make_linear(modules: Sequence[str], shape: LinearShape) -> LinearWeights:
        if not shape.num_experts:
            return DenseWeights(shape, dtype, device, shard)
        return Mxfp4Weights(modules, shape, dtype, device, shard)

    return make_linear


class Mxfp4Weights(Int4Weights):
    """FP4 codes in tiles, filled from blocks and scales; scales are bfloat16, which has all powers of two."""

    codes_are_floats = True

    def __init__(
        self,
        modules: Sequence[str],
        shape: LinearShape,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
    ) -> None:
        self._modules = ", ".join(modules)  # for messages
        if shape.in_features % _BLOCK:
            raise ModelError(
                f"{self._modules}: rows of {shape.in_features} weights have no whole MXFP4 blocks of {_BLOCK}"
            )
        super().__init__(shape, dtype, device, shard, _BLOCK)
        self._halves: dict[str, Tensor] = {}  # blocks or scales that came before the other

    def parameters(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in super().parameters().items():
            stem, _, kind = name.rpartition(".")
            if kind == "weight":
                num_blocks = shape[1] // _BLOCK
                found[f"{stem}.blocks"] = (shape[0], num_blocks, _BLOCK // 2)
                found[f"{stem}.scales"] = (shape[0], num_blocks)
            else:
                found[name] = shape
        return found

    def fill(self, parameter: str, tensor: Tensor) -> None:
        stem, _, kind = parameter.rpartition(".")
        if kind != "bias" and tensor.dtype != torch.uint8:
            raise ModelError(f"{self._modules}: {parameter} holds {tensor.dtype}, and MXFP4 is bytes")
        if kind == "bias":
            super().fill(parameter, tensor)
        elif (other := self._halves.pop(stem, None)) is None:
            self._halves[stem] = tensor
        else:
            blocks, exponents = (tensor, other) if kind == "blocks" else (other, tensor)
            if not exponents.is_meta and (exponents == _NAN).any():
                raise ModelError(f"{self._modules}: a scale of '{stem}' is not a number")
            codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
            powers = exponents.int() - _EXPONENT_BIAS
            scales = torch.ldexp(torch.ones(powers.shape, device=powers.device), powers)
            self.fill_codes(stem, codes, scales.to(torch.bfloat16))

    def random(self, parameter: str, generator: torch.Generator) -> Tensor:
        kind = parameter.rpartition(".")[2]
        if kind == "bias":
            return super().random(parameter, generator)
        shape = self.parameters()[parameter]
        if kind == "scales":  # 2 ** -1 is near the reciprocal of the values' deviation of 2.9 and more
            exponent = round(-1.5 - 0.5 * torch.tensor(float(self.in_features)).log2().item())
            return torch.full(shape, _EXPONENT_BIAS + exponent, dtype=torch.uint8, device=generator.device)
        return torch.randint(256, shape, dtype=torch.uint8, device=generator.device, generator=generator)
