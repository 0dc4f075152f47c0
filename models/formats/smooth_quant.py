"""SmoothQuant checkpoints (Xiao et al., 2023) of LMDeploy: weights of eight bits, inputs scaled by token.

weight int8, or float8_e4m3fn, [out_features, in_features]; scale fp32 [out_features, 1]. The smoothing itself
is in the weights and norms.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from models.errors import ModelError
from models.formats.base import LinearShape, LinearWeights, MakeStored, Shard
from models.formats.dense import DenseWeights
from models.formats.stored_scaled_rows import Storage, StoredScaledRows
from models.weight_names import is_in_layer

_DTYPES = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


def stored(
    quantization: Mapping[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard
) -> MakeStored:
    """Return a maker of linears: those of layers are quantized, an output head is dense."""
    name = str(quantization.get("quant_dtype") or "int8")
    if name not in _DTYPES:
        raise ModelError(f"SmoothQuant weights of {name} are not supported; {' and '.join(_DTYPES)} are")
    storage = Storage(_DTYPES[name], scale_of="feature", inputs="token", scale_name="scale")

    def make_linear(modules: Sequence[str], shape: LinearShape) -> LinearWeights:
        if not is_in_layer(modules):
            return DenseWeights(shape, dtype, device, shard)
        return StoredScaledRows(modules, shape, dtype, device, shard, storage)

    return make_linear
