"""FP8 checkpoints of NVIDIA's ModelOpt, whose options are in config.json or in hf_quant_config.json.

weight float8_e4m3fn [out_features, in_features]. FP8 has weight_scale and input_scale of whole tensors, fp32
[]; FP8_PER_CHANNEL_PER_TOKEN has weight_scale [out_features], and inputs are scaled by token.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from models.errors import ModelError
from models.formats import refusal
from models.formats.base import LinearShape, LinearWeights, MakeStored, Shard
from models.formats.dense import DenseWeights
from models.formats.stored_scaled_rows import Storage, StoredScaledRows
from models.weight_names import all_or_none, names_under

_ALGORITHMS = {
    "FP8": Storage(torch.float8_e4m3fn, scale_of="tensor", inputs="static"),
    "FP8_PER_CHANNEL_PER_TOKEN": Storage(torch.float8_e4m3fn, scale_of="feature", inputs="token"),
}


def stored(
    quantization: Mapping[str, Any], dtype: torch.dtype, device: torch.device, shard: Shard
) -> MakeStored:
    """Return a maker of linears: excluded ones are dense, and all are if only KV is quantized."""
    options = quantization.get("quantization") or quantization  # the file has them one level deeper
    if not isinstance(options, Mapping):
        raise ModelError("'quantization' of ModelOpt is not a JSON object")
    algorithm = str(options.get("quant_algo") or "").upper()
    if "NVFP4" in algorithm:
        raise refusal("nvfp4", f"ModelOpt's algorithm '{algorithm}'")
    if algorithm and algorithm not in _ALGORITHMS:
        raise ModelError(
            f"ModelOpt's algorithm '{algorithm}' is not supported; {' and '.join(_ALGORITHMS)} are"
        )
    listed = names_under("exclude_modules", options) or names_under("ignore", options)
    excluded = [part.strip(".") for part in listed]

    def make_linear(modules: Sequence[str], shape: LinearShape) -> LinearWeights:
        if not algorithm or _are_excluded(modules, excluded):
            return DenseWeights(shape, dtype, device, shard)
        return StoredScaledRows(modules, shape, dtype, device, shard, _ALGORITHMS[algorithm])

    return make_linear


def _are_excluded(modules: Sequence[str], excluded: Sequence[str]) -> bool:
    """Return True if patterns, in which `*` is any text, match paths of the modules or parts of such paths.

    Raises ModelError if they match only some of the modules, which fill one linear.
    """
    found = [any(fnmatchcase(f".{name}.", f"*.{part}.*") for part in excluded) for name in modules]
    return all_or_none(modules, found)
