"""Converts GGUF blocks to float tensors.

The most frequent block types are unpacked by torch, many rows at a time; the rest by the reference in the
`gguf` package, which is about ten times slower. Layouts as in ggml's `ggml-common.h`.
"""

from collections.abc import Callable

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants
from torch import Tensor

from models.errors import ModelError
from models.gguf.file import GGUFTensor

# Values unpacked at a time. Temporaries stay in the cache, and torch runs operations of this size on the
# calling thread: 98 MB take 0.6 s, and little more while the tokenizer loads on another core. Larger
# operations use all cores: 0.5 s alone, but 4 s during that load, because their threads wait for each other.
_CHUNK_VALUES = 1 << 15


def dequantize(tensor: GGUFTensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor's values in its shape and in `dtype`. Raises ModelError for an unknown type."""
    rows = tensor.raw.shape[0]
    values = tensor.shape[-1]
    out = torch.empty(rows, values, dtype=dtype)
    step = max(1, _CHUNK_VALUES // values)
    unpack = _UNPACK.get(tensor.type)
    for start in range(0, rows, step):
        part = tensor.raw[start : start + step]
        if unpack is not None:
            out[start : start + step] = unpack(torch.from_numpy(part)).view(part.shape[0], values)
        else:
            out[start : start + step] = torch.from_numpy(_by_reference(part, tensor))
    return out.view(tensor.shape)


def _by_reference(part: np.ndarray, tensor: GGUFTensor) -> np.ndarray:
    try:
        values: np.ndarray = quants.dequantize(part, tensor.type)
    except NotImplementedError:
        raise ModelError(
            f"tensor {tensor.name} is of type {tensor.type.name}, which cannot be unpacked"
        ) from None
    return values


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def unpack(raw: Tensor) -> Tensor:
        return raw.view(dtype)

    return unpack


def _blocks(raw: Tensor, block_bytes: int) -> Tensor:
    return raw.view(-1, block_bytes)


def _half(raw: Tensor) -> Tensor:
    """Return float32 [blocks, 1] from the two bytes of a float16. Blocks need not be aligned: copy first."""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """Return [blocks, 2 n] values below 16 from [blocks, n] bytes: all low halves, then all high halves."""
    return torch.cat((raw & 15, raw >> 4), dim=1)


def _q4_0(raw: Tensor) -> Tensor:
    """32 values: float16 scale, 16 bytes of nibbles; (nibble - 8) * scale."""
    b = _blocks(raw, 18)
    return (_nibbles(b[:, 2:]).float() - 8) * _half(b[:, :2])


def _q4_1(raw: Tensor) -> Tensor:
    """32 values: float16 scale and minimum, 16 bytes of nibbles; nibble * scale + minimum."""
    b = _blocks(raw, 20)
    return _nibbles(b[:, 4:]).float() * _half(b[:, :2]) + _half(b[:, 2:4])


def _q8_0(raw: Tensor) -> Tensor:
    """32 values: float16 scale, 32 int8; value * scale."""
    b = _blocks(raw, 34)
    return b[:, 2:].view(torch.int8).float() * _half(b[:, :2])


def _scales_and_minima(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight 6-bit scales and minima, [blocks, 8] each, from 12 bytes of a Q4_K or Q5_K block."""
    d, m, high = raw.view(-1, 3, 4).unbind(1)
    scales = torch.cat((d & 63, (high & 15) | ((d >> 2) & 48)), dim=1)
    minima = torch.cat((m & 63, (high >> 4) | ((m >> 2) & 48)), dim=1)
    return scales.float(), minima.float()


def _q4_k(raw: Tensor) -> Tensor:
    """256 values: float16 scale and minimum of the 6-bit scales and minima, 128 bytes of nibbles."""
    b = _blocks(raw, 144)
    scales, minima = _scales_and_minima(b[:, 4:16].contiguous())
    nibbles = b[:, 16:].reshape(-1, 4, 1, 32) >> torch.tensor([0, 4], dtype=torch.uint8).view(1, 1, 2, 1)
    values = (nibbles & 15).reshape(-1, 8, 32).float()
    return values * (_half(b[:, :2]) * scales)[..., None] - (_half(b[:, 2:4]) * minima)[..., None]


def _q5_k(raw: Tensor) -> Tensor:
    """As Q4_K, with a fifth bit per value: bit j of byte i belongs to value i of the j-th 32."""
    b = _blocks(raw, 176)
    scales, minima = _scales_and_minima(b[:, 4:16].contiguous())
    fifth = b[:, 16:48].reshape(-1, 1, 32) >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    nibbles = b[:, 48:].reshape(-1, 4, 1, 32) >> torch.tensor([0, 4], dtype=torch.uint8).view(1, 1, 2, 1)
    values = ((nibbles & 15).reshape(-1, 8, 32) | ((fifth & 1) << 4)).float()
    return values * (_half(b[:, :2]) * scales)[..., None] - (_half(b[:, 2:4]) * minima)[..., None]


def _q6_k(raw: Tensor) -> Tensor:
    """256 values: 128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales, float16 scale of these."""
    b = _blocks(raw, 210)
    low = b[:, :128].reshape(-1, 2, 1, 64) >> torch.tensor([0, 4], dtype=torch.uint8).view(1, 1, 2, 1)
    high = b[:, 128:192].reshape(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(
        1, 1, 4, 1
    )
    values = (low & 15).reshape(-1, 8, 32) | ((high & 3).reshape(-1, 8, 32) << 4)
    scales = b[:, 192:208].view(torch.int8).float() * _half(b[:, 208:])
    return (values.float() - 32).view(-1, 16, 16) * scales[..., None]


_UNPACK: dict[Type, Callable[[Tensor], Tensor]] = {
    Type.F32: _plain(torch.float32),
    Type.F16: _plain(torch.float16),
    Type.BF16: _plain(torch.bfloat16),
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
    Type.Q8_0: _q8_0,
    Type.Q4_K: _q4_k,
    Type.Q5_K: _q5_k,
    Type.Q6_K: _q6_k,
}
