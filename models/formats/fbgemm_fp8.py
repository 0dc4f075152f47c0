"""FP8 checkpoints of FBGEMM, such as Llama 3.1 405B FP8: inputs are quantized with a scale of each token.

weight float8_e4m3fn [out_features, in_features], weight_scale fp32 [out_features, 1]. Inputs above
`activation_scale_ub`, which the tool's own product cuts off, are kept.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from models.formats.base import LinearShape, LinearWeights, MakeStored, Shard
from models.formats.stored_scaled_rows import Storage, StoredScaledRows

_STORAGE = Storage(torch.float8_e4m3fn, scale_of="feature", inputs="token")


def stored(
    quantization: Mapping[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard
) -> MakeStored:
    """Return a maker of fp8 linears."""

    def make_linear(modules: Sequence[str], shape: LinearShape) -> LinearWeights:
        return StoredScaledRows(modules, shape, dtype, device, shard, _STORAGE)

    return make_linear
