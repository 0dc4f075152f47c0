"""Headers of safetensors files: where each tensor lies, checked in full before anything is read.

The format (https://github.com/huggingface/safetensors): the header's length as a little-endian u64, the
header as JSON, then the tensors' bytes without gaps. Offsets count from the end of the header.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from models.errors import ModelError

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_MOST_ELEMENTS = 1 << 62  # sizes stay within int64
_GIT_LFS = b"version https://git-lfs"
_ZIP, _PICKLE = b"PK\x03\x04", (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # torch.save writes them

PICKLE = (
    "a pickle, and reading a pickle runs whatever code is in it: take a safetensors version of the model, or "
    "convert it once with save_pretrained"
)
"""What a pickle is, as the end of a sentence, and what to do about it."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `num_bytes` from byte `start` on, contiguous, little-endian."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name, in their order in the file.

    Raises ModelError, naming the file, if it is broken: no two tensors may share a byte, and all bytes after
    the header belong to one.
    """
    try:
        header, data, size = _read(file)
        found = {
            name: _tensor(file, name, entry, data) for name, entry in header.items() if name != "__metadata__"
        }
        found = dict(sorted(found.items(), key=lambda item: (item[1].start, item[1].num_bytes)))
        _check_extents(found, data, size)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    return found


def _read(file: Path) -> tuple[dict[str, Any], int, int]:
    """Return the parsed header, where the tensors begin, and the size of the file."""
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(0)
        first = opened.read(_LENGTH_BYTES)
        if first == _GIT_LFS[:_LENGTH_BYTES]:
            raise ValueError(
                "it is a pointer of Git LFS, without the weights; fetch them with `git lfs pull`"
            )
        if first.startswith(_ZIP):
            raise ValueError(f"it is {PICKLE}")
        if size < _LENGTH_BYTES:
            raise ValueError(f"it is truncated: it has {size} bytes, less than a header")
        (length,) = struct.unpack("<Q", first)
        if length > _MOST_HEADER_BYTES and first.startswith(_PICKLE):
            raise ValueError(f"it is {PICKLE}")
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"it is no safetensors file: it says that its header has {length} bytes")
        if length > size - _LENGTH_BYTES:
            raise ValueError(f"it is truncated: it has {size} bytes, and its header alone {length}")
        text = opened.read(length)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ValueError(f"its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header, _LENGTH_BYTES + length, size


def _tensor(file: Path, name: str, entry: Any, data: int) -> StoredTensor:
    """Return the tensor that an entry of the header describes. Raises ValueError."""
    if not isinstance(entry, dict):
        raise ValueError(f"the entry of {name} in its header is not a JSON object")
    dtype = _DTYPES.get(str(entry.get("dtype")))
    if dtype is None:
        raise ValueError(f"{name} has the dtype {entry.get('dtype')!r:.99}, which is not supported")
    shape, offsets = _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"{name} has no shape and data_offsets in its header that make sense")
    num_bytes = prod(shape) * dtype.itemsize
    if prod(max(1, size) for size in shape) > _MOST_ELEMENTS or num_bytes != offsets[1] - offsets[0]:
        raise ValueError(
            f"{name} has {offsets[1] - offsets[0]} bytes, which a tensor of {list(shape)!s:.99} cannot have"
        )
    return StoredTensor(file, dtype, shape, data + offsets[0], num_bytes)


def _sizes(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(size) is int and size >= 0 for size in value):
        return tuple(value)
    return None


def _check_extents(tensors: Mapping[str, StoredTensor], data: int, size: int) -> None:
    """Check that tensors, in order, cover the bytes from `data` to `size` once each. Raises ValueError."""
    end, last = data, "the header"
    for name, tensor in tensors.items():
        if tensor.start != end:
            what = "overlaps with" if tensor.start < end else "leaves a gap after"
            raise ValueError(f"{name} {what} {last}")
        end, last = end + tensor.num_bytes, name
    if end > size:
        raise ValueError(f"it is truncated: it has {size} bytes, and its header describes {end}")
    if end < size:
        raise ValueError(f"it has {size - end} bytes after its last tensor")
