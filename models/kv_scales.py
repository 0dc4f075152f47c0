"""Scales of keys and values in fp8 that a checkpoint stores, measured when it was quantized."""

import logging
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from models.checkpoint import Checkpoint
from models.config_values import mapping
from models.errors import ModelError
from models.placement import listed

logger = logging.getLogger("monoloop.models")

# compressed-tensors and ModelOpt. In older files: `kv_scale`, that of both, and `output_scale`.
_NAME = re.compile(r"\.(\d+)\.self_attn\.(?:(?:(?:k|v|qkv)_proj\.)?(k|v|kv)_scale|(k|v)_proj\.output_scale)$")

_USUAL = 1e-6, 1e6

KVScales = tuple[tuple[float, float], ...]
"""Scale of the keys and of the values of each layer: what is stored times the scale is the value."""


def read_kv_scales(checkpoint: Checkpoint) -> KVScales | None:
    """Return the scales of a checkpoint's layers; None if it has none.

    Raises ModelError, naming the tensor, for a scale that is missing, not one number, or not a positive one,
    and for scales that its configuration says are of another dtype than fp8. Logs those that are far from 1.
    """
    num_layers = checkpoint.spec.num_layers
    names = {
        (int(match[1]), kind): name
        for name in checkpoint.num_bytes
        if (match := _NAME.search(name)) and int(match[1]) < num_layers
        for kind in match[2] or match[3]
    }
    if not names:
        return None
    _check_scheme(checkpoint.quantization or {})
    found = dict(zip(names, _values(checkpoint, names.values()), strict=True))
    low, high = _USUAL
    if unusual := [f"{names[key]} ({value:g})" for key, value in found.items() if not low <= value <= high]:
        logger.warning(
            "scales of keys and values are not within %g and %g: %s; if answers make no sense, choose "
            "another kv_dtype",
            low,
            high,
            listed(unusual),
        )
    for layer in range(num_layers):
        for kind in "kv":
            if (layer, kind) not in found:
                raise ModelError(f"the checkpoint has {kind}_scale of some layers and not of layer {layer}")
    return tuple((found[layer, "k"], found[layer, "v"]) for layer in range(num_layers))


def _check_scheme(quantization: Mapping[str, Any]) -> None:
    """Raise ModelError if the configuration says that keys and values are not in fp8.

    compressed-tensors and ModelOpt write kv_cache_scheme in config.json, ModelOpt kv_cache_quant_algo in
    hf_quant_config.json.
    """
    scheme = mapping(quantization, "kv_cache_scheme")
    bits, kind = scheme.get("num_bits"), scheme.get("type")
    if scheme and (bits, kind) != (8, "float"):
        raise _other_scheme(f"kv_cache_scheme has num_bits {bits!r:.99} and type {kind!r:.99}")
    algorithm = mapping(quantization, "quantization").get("kv_cache_quant_algo")
    if algorithm not in (None, "FP8"):
        raise _other_scheme(f"kv_cache_quant_algo is {algorithm!r:.99}")


def _other_scheme(what: str) -> ModelError:
    return ModelError(
        f"{what}: the checkpoint's scales of keys and values are not those of fp8; choose another kv_dtype"
    )


def _values(checkpoint: Checkpoint, names: Iterable[str]) -> Iterable[float]:
    names = list(names)
    for name, tensor in zip(names, checkpoint.read(names, torch.float32, torch.device("cpu")), strict=True):
        if tensor.numel() != 1:
            raise ModelError(
                f"{name} has the shape {list(tensor.shape)}; one scale for all keys or values of a layer is "
                "supported"
            )
        if not tensor.is_floating_point():
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"{name} holds {dtype}, and a scale is a floating-point number")
        value = float(tensor)
        if not (value > 0 and math.isfinite(value)):
            raise ModelError(f"{name} is {value}, and a scale is a positive number")
        yield value
