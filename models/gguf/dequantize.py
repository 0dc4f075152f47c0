"""Converts the tensors of a GGUF file to floats, many rows at a time."""

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from models.errors import ModelError
from models.gguf.blocks import BLOCK_TYPES, unpack
from models.gguf.file import GGUFTensor

# Values unpacked at a time on a CPU. Temporaries stay in the cache, and torch runs operations of this size on
# the calling thread: 98 MB take 0.6 s, and little more while the tokenizer loads on another core. Larger
# operations use all cores: 0.5 s alone, but 4 s during that load, because their threads wait for each other.
_CPU_VALUES = 1 << 15
# On a GPU each of the about 20 operations costs 10 us; a float32 temporary of this size takes 64 MB.
_GPU_VALUES = 1 << 24

_FLOATS = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
TYPE_NAMES = tuple(kind.name for kind in (*_FLOATS, *BLOCK_TYPES))


def check_type(tensor: GGUFTensor) -> None:
    """Raise ModelError for a tensor of a type that is not read here, naming the nearest one that is."""
    if tensor.type in _FLOATS or tensor.type in BLOCK_TYPES:
        return
    enough = [kind for kind in (*BLOCK_TYPES, *_FLOATS) if _bits(kind) >= _bits(tensor.type)]
    nearest = min(enough, key=lambda kind: (_bits(kind), kind), default=Type.F32)
    raise ModelError(
        f"tensor {tensor.name} is of type {tensor.type.name}, which is not supported; "
        f"the nearest type that is: {nearest.name}"
    )


def _bits(kind: Type) -> float:
    """Return the bits per value."""
    values, size = GGML_QUANT_SIZES[kind]
    return 8.0 * float(size) / float(values)


def dequantize(tensor: GGUFTensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the tensor's values in its shape and in `dtype`, computed on the device from the blocks.

    Raises ModelError for a type that is not read here.
    """
    check_type(tensor)
    rows, values = tensor.raw.shape[0], tensor.shape[-1]
    out = torch.empty(rows, values, dtype=dtype, device=device)
    step = max(1, (_CPU_VALUES if device.type == "cpu" else _GPU_VALUES) // values)
    for start in range(0, rows, step):
        raw = torch.from_numpy(tensor.raw[start : start + step]).to(device)
        out[start : start + step] = _floats(raw, tensor.type).view(-1, values)
    return out.view(tensor.shape)


def _floats(raw: Tensor, kind: Type) -> Tensor:
    if kind in _FLOATS:
        return raw.view(_FLOATS[kind])
    codes, scales, offsets = unpack(raw, kind)
    values = codes * scales
    return values if offsets is None else values.add_(offsets)
