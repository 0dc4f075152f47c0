"""Read-only view of a GGUF file: its metadata and the position of each tensor.

Written against the GGUF specification (version 2 and 3, little-endian). The reader of the `gguf` package
builds numpy arrays for every vocabulary entry, which takes seconds; this one walks the header once, in 0.1 s.
"""

import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from models.errors import ModelError

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4
# The least bytes of a key with its value, and of a tensor in the header: both with an empty name.
_KEY_BYTES, _TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: shape outermost dimension first; its blocks of `type` as raw bytes [rows, row_bytes]."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    raw: np.ndarray


class GGUFFile:
    """A memory-mapped GGUF file, never written to. Raises ModelError for other or truncated files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            # Copy-on-write: nothing here writes, but torch only takes arrays it may write to.
            self._bytes = np.asarray(np.memmap(path, dtype=np.uint8, mode="c"))
            self._view = memoryview(self._bytes.data)
            self._at = 0
            self._read_header()
        except (ValueError, OSError) as error:
            raise ModelError(f"{path} is not a complete GGUF file: {error}") from error

    def _read_header(self) -> None:
        magic = bytes(self._view[:4])
        if magic != b"GGUF":
            raise ValueError(f"it begins with {magic!r}, not with GGUF")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3)
            raise ValueError("it is big-endian" if is_swapped else f"version {version} is not supported")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        if num_keys * _KEY_BYTES + num_tensors * _TENSOR_BYTES > len(self._bytes):
            raise ValueError(
                f"{num_keys} keys and {num_tensors} tensors do not fit in its {len(self._bytes)} bytes"
            )
        for _ in range(num_keys):
            self._read_key()
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its tensors are aligned to {alignment!r}")
        data = -(-self._at // alignment) * alignment
        extents = []
        for name, kind, shape, offset in infos:
            if offset % alignment:
                raise ValueError(f"tensor {name} is at {offset}, which is not a multiple of {alignment}")
            self.tensors[name] = self._tensor(name, kind, shape, data + offset)
            extents.append((offset, offset + self.tensors[name].raw.nbytes, name))
        for (_, end, before), (start, _, name) in pairwise(sorted(extents)):
            if start < end:
                raise ValueError(f"tensor {name} overlaps with {before}")

    def _read_key(self) -> None:
        key = self._string()
        if key in self.metadata:
            raise ValueError(f"the key {key} appears twice")
        try:
            self.metadata[key] = self._value(self._scalar("I"))
        except ValueError as error:
            raise ValueError(f"the value of {key}: {error}") from error

    def _tensor_info(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name, num_dimensions = self._string(), self._scalar("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))
        if 0 in shape:
            raise ValueError(f"tensor {name} is empty: {list(shape[::-1])}")
        number, offset = self._scalar("I"), self._scalar("Q")
        try:
            return name, GGMLQuantizationType(number), shape[::-1], offset
        except ValueError:
            raise ValueError(f"tensor {name} is of the type number {number}, which is not known") from None

    def _tensor(
        self, name: str, kind: GGMLQuantizationType, shape: tuple[int, ...], start: int
    ) -> GGUFTensor:
        if name in self.tensors:
            raise ValueError(f"tensor {name} appears twice")
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block_values:
            raise ValueError(f"tensor {name}: rows of {shape[-1]} are not whole {kind.name} blocks")
        rows, row_bytes = prod(shape[:-1]), shape[-1] // block_values * block_bytes
        if start + rows * row_bytes > len(self._bytes):
            raise ValueError(f"tensor {name} reaches beyond the end of the file")
        raw = self._bytes[start : start + rows * row_bytes].reshape(rows, row_bytes)
        return GGUFTensor(name, kind, shape, raw)

    def _scalar(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        if self._at + size > len(self._view):
            raise ValueError("it ends in its header")
        value = struct.unpack_from(f"<{code}", self._view, self._at)[0]
        self._at += size
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """Read strings. A vocabulary has a hundred thousand, so the loop uses local names only."""
        view, end, at = self._view, len(self._view), self._at
        read_length = struct.Struct("<Q").unpack_from
        found = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + read_length(view, at)[0]
                if at > end:
                    raise ValueError("a string reaches beyond the end of the file")
                found.append(str(view[start:at], "utf-8"))
        except struct.error:
            raise ValueError("it ends in its header") from None
        self._at = at
        return found

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_scalar_code(kind))
        item, count = self._scalar("I"), self._scalar("Q")
        if item == _STRING:
            return self._strings(count)
        dtype = np.dtype(f"<{_scalar_code(item)}")
        if self._at + count * dtype.itemsize > len(self._view):
            raise ValueError(f"{count} numbers reach beyond the end of the file")
        found = np.frombuffer(self._view, dtype, count, self._at)
        self._at += found.nbytes
        return found.tolist()


def _scalar_code(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"its type number {kind} is not supported")
    return _SCALARS[kind]
