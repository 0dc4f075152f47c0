"""Scales of keys and values in fp8 that a checkpoint stores, measured when it was quantized."""

import math
import re
from collections.abc import Iterable

import torch

from models.checkpoint import Checkpoint
from models.errors import ModelError

# compressed-tensors and ModelOpt. In older files: `kv_scale`, that of both, and `output_scale`.
_NAME = re.compile(r"\.(\d+)\.self_attn\.(?:(?:(?:k|v|qkv)_proj\.)?(k|v|kv)_scale|(k|v)_proj\.output_scale)$")

KVScales = tuple[tuple[float, float], ...]
"""Scale of the keys and of the values of each layer: what is stored times the scale is the value."""


def read_kv_scales(checkpoint: Checkpoint) -> KVScales | None:
    """Return the scales of a checkpoint's layers; None if it has none.

    Raises ModelError, naming the tensor, for a scale that is missing, not one number, or not a positive one.
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
    found = dict(zip(names, _values(checkpoint, names.values()), strict=True))
    for layer in range(num_layers):
        for kind in "kv":
            if (layer, kind) not in found:
                raise ModelError(f"the checkpoint has {kind}_scale of some layers and not of layer {layer}")
    return tuple((found[layer, "k"], found[layer, "v"]) for layer in range(num_layers))


def _values(checkpoint: Checkpoint, names: Iterable[str]) -> Iterable[float]:
    names = list(names)
    for name, tensor in zip(names, checkpoint.read(names, torch.float32, torch.device("cpu")), strict=True):
        if tensor.numel() != 1:
            raise ModelError(
                f"{name} has the shape {list(tensor.shape)}; one scale for all keys or values of a layer is "
                "supported"
            )
        value = float(tensor)
        if not (value > 0 and math.isfinite(value)):
            raise ModelError(f"{name} is {value}, and a scale is a positive number")
        yield value
