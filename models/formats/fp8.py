"""fp8 (e4m3) weights and activations: one float32 scale per output feature and one per token (W8A8).

Converted from unquantized weights. Halves the memory of the layers; kernels/quantized_linear.py has the
times. Experts, and GPUs without products of fp8 (compute capability below 8.9), multiply by the weight alone
(W8A16).
"""

import logging

import torch
from torch import Tensor

from kernels.fp8_values import has_fp8
from models.formats.base import MakeLinear, Shard
from models.formats.dense import with_dense_head
from models.formats.scaled_rows import ScaledRows, quantized_product

logger = logging.getLogger("monoloop.models")


def conversion(dtype: torch.dtype, device: torch.device, shard: Shard) -> MakeLinear:
    """Return a maker of fp8 linears; the output head stays dense."""
    if not has_fp8(device):
        logger.warning("%s has no products of fp8: weights are fp8, activations stay %s", device, dtype)
    return with_dense_head(Fp8Weights, dtype, device, shard)


class Fp8Weights(ScaledRows):
    """Rows of fp8 and their scales."""

    values_dtype = torch.float8_e4m3fn

    def _product(self, x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        return quantized_product(x, values, scale, bias)
