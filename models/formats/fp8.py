"""fp8 (e4m3) weights and activations (W8A8): converted, or from checkpoints with `quant_method: fp8`.

A conversion has one float32 scale per output feature and one per token; kernels/quantized_linear.py has the
times. Experts, and GPUs without products of fp8 (compute capability below 8.9), multiply by the weight alone
(W8A16).

Official FP8 checkpoints (DeepSeek-V3, Qwen3-*-FP8) have blocks and store scales as weight_scale_inv. Those of
activations are not rounded to powers of two where `scale_fmt` is ue8m0, as those of the weights are: products
are then nearer to those of the model before its quantization. Without blocks transformers stores
weight_scale_inv and, of static activations, activation_scale; configurations without `weight_block_size`,
which AutoFP8 and vLLM write, name them weight_scale and input_scale.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from kernels.block_linear import BLOCK
from kernels.fp8_values import FP8
from models.errors import ModelError
from models.formats.base import LinearShape, LinearWeights, MakeLinear, MakeStored, Shard
from models.formats.dense import DenseWeights, with_dense_head
from models.formats.fp8_blocks import BlockWeights
from models.formats.scaled_rows import ScaledRows, fp8_fallback, quantized_product
from models.formats.stored_scaled_rows import Storage, StoredScaledRows
from models.weight_names import is_excluded, is_in_layer, names_under

_INPUTS: dict[str, Literal["token", "static"]] = {"dynamic": "token", "static": "static"}


def conversion(dtype: torch.dtype, device: torch.device, shard: Shard) -> MakeLinear:
    """Return a maker of fp8 linears; the output head stays dense."""
    return with_dense_head(Fp8Weights, dtype, device, shard)


def stored(
    quantization: Mapping[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard
) -> MakeStored:
    """Return a maker of linears: those of layers are fp8, an output head is dense. Raises ModelError."""
    storage = _storage(quantization)
    make = BlockWeights if storage.scale_of == "block" else StoredScaledRows
    excluded = names_under("ignored_layers", quantization)

    def make_linear(modules: Sequence[str], shape: LinearShape) -> LinearWeights:
        if not is_in_layer(modules) or is_excluded(modules, excluded):
            return DenseWeights(shape, dtype, device, shard)
        return make(modules, shape, dtype, device, shard, storage)

    return make_linear


def _storage(quantization: Mapping[str, Any]) -> Storage:
    """Return how weights are stored. Raises ModelError for ways that are not supported."""
    scheme = quantization.get("activation_scheme") or "dynamic"
    blocks = quantization.get("weight_block_size")
    for key, supported in (
        ("fmt", ("e4m3",)),
        ("activation_scheme", ("dynamic",) if blocks else tuple(_INPUTS)),
        ("scale_fmt", ("float", "ue8m0")),
        ("expert_dtype", ("fp8",)),
    ):
        value = quantization.get(key)
        if value is not None and value not in supported:
            raise ModelError(
                f"fp8 with {key} {value!r} is not supported; {' and '.join(map(repr, supported))} "
                f"{'is' if len(supported) == 1 else 'are'}"
            )
    if blocks:
        if blocks != [BLOCK, BLOCK]:
            raise ModelError(f"fp8 with weight_block_size {blocks!r} is not supported; [{BLOCK}, {BLOCK}] is")
        return Storage(FP8, "block", "token", scale_name="weight_scale_inv")
    if "weight_block_size" in quantization:
        return Storage(
            FP8,
            "tensor",
            _INPUTS[scheme],
            scale_name="weight_scale_inv",
            input_scale_name="activation_scale",
        )
    return Storage(FP8, "tensor", _INPUTS[scheme])


class Fp8Weights(ScaledRows):
    """Rows of fp8 and their scales."""

    values_dtype = FP8

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: torch.device, shard: Shard) -> None:
        super().__init__(shape, dtype, device, shard)
        self.fallback = fp8_fallback(device)

    def _product(self, x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        return quantized_product(x, values, scale, bias)
