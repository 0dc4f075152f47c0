"""Base of formats whose checkpoints store weights of eight bits, with a scale per output feature or tensor.

The inputs of a product are quantized, too, or only the weight is; experts are always weight-only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.eight_bit_linear import eight_bit_linear
from kernels.fp8_values import FP8
from models.errors import ModelError
from models.formats.base import LinearShape, Shard
from models.formats.scaled_rows import ScaledRows, fp8_fallback, quantized_product

_SPREAD = 30.0  # standard deviation of random values


@dataclass(frozen=True)
class Storage:
    """How a tool stores a weight of eight bits, and what a product does with its inputs.

    `dtype` is that of the weight. `inputs` are quantized to it with a scale of each token ("token"), with the
    stored input scale ("static"), or not at all. `unread` are tensors of one value that are not used, and
    `fallback` is what products do in another way than the tool, for the log.
    """

    dtype: torch.dtype
    scale_of: Literal["feature", "tensor", "block"]
    inputs: Literal["token", "static", "unquantized"]
    unread: tuple[str, ...] = ()
    fallback: str | None = None
    scale_name: str = "weight_scale"
    input_scale_name: str = "input_scale"


class StoredScaledRows(ScaledRows):
    """Rows of fp8 or int8 as a checkpoint stores them; `modules` are its names, for messages.

    The scale of a tensor becomes that of each of its output features, so that fused outputs keep their own.
    If fused outputs have different input scales, the largest is that of all.
    """

    def __init__(
        self,
        modules: Sequence[str],
        shape: LinearShape,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
        storage: Storage,
    ) -> None:
        super().__init__(shape, dtype, device, shard)
        self.values_dtype = storage.dtype
        self._modules = modules
        self._outputs = list(shape.outputs)
        self._storage = storage
        self.fallback = storage.fallback
        if storage.inputs != "unquantized" and storage.dtype.is_floating_point:
            self.fallback = fp8_fallback(device)
        self._input_scale: Tensor | None = None  # fp32 [1]
        self._halves: set[str] = set()  # outputs of which the weight or the scale has come

    def parameters(self) -> dict[str, tuple[int, ...]]:
        storage = self._storage
        single = (*[storage.input_scale_name] * (storage.inputs == "static"), *storage.unread)
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in super().parameters().items():
            found[name] = shape
            stem = name.removesuffix("weight")
            if stem != name:
                found[f"{stem}{storage.scale_name}"] = self._stored_scale_shape(shape)
                found |= {f"{stem}{kind}": (1,) for kind in single}
        return found

    def fill(self, parameter: str, tensor: Tensor) -> None:
        storage, (name, _, kind) = self._storage, parameter.rpartition(".")
        rows, first = self._rows[name]
        mine = slice(first, first + rows.stop - rows.start)
        if kind == "weight":
            if tensor.dtype != storage.dtype:
                raise self._error(parameter, f"holds {_name(tensor.dtype)}, not {_name(storage.dtype)}")
            if tensor.dtype == FP8 and not tensor.is_meta and _has_nan(tensor):
                raise self._error(parameter, "has values that are not numbers")
            values, _ = self._allocate()
            values[mine].copy_(tensor[rows, self._columns])
            self._check_zeros(name, mine)
        elif kind == storage.scale_name:
            self._fill_scale(rows, mine, self._checked(parameter, tensor, may_be_zero=True))
            self._check_zeros(name, mine)
        elif kind in storage.unread:
            return
        elif kind == storage.input_scale_name:
            if not self.num_experts:
                scale = self._checked(parameter, tensor).to(self._device)
                self._input_scale = scale if self._input_scale is None else self._input_scale.maximum(scale)
        else:
            super().fill(parameter, tensor)

    def _stored_scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the stored scale of a weight [out_features, in_features]."""
        return shape[:1] if self._storage.scale_of == "feature" else (1,)

    def _fill_scale(self, rows: slice, target: slice, stored: Tensor) -> None:
        """Keep the scales of a weight's rows as those of the rows `target` of all outputs."""
        _, scale = self._allocate()
        scale[target].copy_(stored[rows] if self._storage.scale_of == "feature" else stored)

    def _product(self, x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        if self._storage.inputs == "unquantized":
            return eight_bit_linear(x, values, scale, bias)
        return quantized_product(x, values, scale, bias, self._input_scale)

    def _expanded(self, scale: Tensor) -> Tensor:
        """Return scales of rows in a shape that multiplies values [n, in_features of the rank]."""
        return scale[:, None]

    def _check_zeros(self, name: str, mine: slice) -> None:
        """Raise ModelError if an output, when it is complete, has a scale of 0 for other values than 0."""
        if name not in self._halves:
            self._halves.add(name)
            return
        values, scales = self._allocate()
        size = self.out_features // max(1, len(scales))  # rows that have one scale
        scale = scales[mine.start // size : mine.stop // size]
        if scale.is_meta or not (scale == 0).any():
            return
        if ((self._expanded(scale) == 0) & (values[mine].float() != 0)).any():
            parameter = f"{name}.{self._storage.scale_name}".lstrip(".")
            raise self._error(parameter, "has 0.0 for weights that are not 0")

    def _checked(self, parameter: str, scale: Tensor, may_be_zero: bool = False) -> Tensor:
        """Return scales in fp32. Raises ModelError, naming the tensor, for values that are no scale."""
        if not scale.is_floating_point():
            raise self._error(parameter, f"holds {_name(scale.dtype)}, and scales are floats")
        scale = scale.float()
        if not scale.is_meta:
            positive = scale >= 0 if may_be_zero else scale > 0
            bad = scale[~(positive & scale.isfinite())]
            if len(bad):
                raise self._error(parameter, f"has {bad[0].item()}, and scales are positive numbers")
        return scale

    def _error(self, parameter: str, message: str) -> ModelError:
        """Return an error about the tensor of the checkpoint that fills a parameter."""
        name, _, kind = parameter.rpartition(".")
        expert, _, output = name.partition(".") if self.num_experts else ("", "", name)
        packed = len(self._modules) != len(self._outputs)
        module = self._modules[0 if packed else self._outputs.index(output)]
        if expert:  # the modules are those of expert 0
            module = f".{expert}.".join(module.rsplit(".0.", 1))
        return ModelError(f"{module}.{kind} {message}")

    def random(self, parameter: str, generator: torch.Generator) -> Tensor:
        kind, device = parameter.rpartition(".")[2], generator.device
        if kind == "bias":
            return super().random(parameter, generator)
        if kind == "weight":
            values = torch.randn(self._parameters[parameter], device=device, generator=generator).mul_(
                _SPREAD
            )
            return values.clamp_(-127, 127).to(self.values_dtype)
        shape = self.parameters()[parameter]
        if kind == self._storage.scale_name:
            return torch.full(shape, self.in_features**-0.5 / _SPREAD, device=device)
        return torch.full(shape, 1 / _SPREAD, device=device)


def _has_nan(values: Tensor) -> bool:
    """Return True if fp8 values have one of the two codes that are no number, 0x7f and 0xff.

    They are the largest bytes with a sign and without: two reductions take no memory, as `isnan` does.
    """
    return bool(values.view(torch.int8).max() == 0x7F) or bool(values.view(torch.uint8).max() == 0xFF)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
