"""A .gguf file as a checkpoint."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint import read_family_spec
from models.errors import ModelError
from models.families import gguf_family_of
from models.gguf.dequantize import dequantize
from models.gguf.file import GGUFFile
from models.rope import FactorScaling
from models.spec import AttentionSpec
from models.weight_names import WeightMap


class GGUFCheckpoint:
    """One .gguf file. Its tensors are dequantized as they are read."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        metadata = self._file.metadata
        if int(metadata.get("split.count", 0)) > 1:
            raise ModelError(f"{path} is one part of several; join them with `gguf-split --merge`")
        self.family = gguf_family_of(str(metadata.get("general.architecture", "")))
        try:
            config = self.family.gguf_config(metadata)
        except KeyError as error:
            raise ModelError(f"{path}: the metadata lacks {error}") from None
        config["tie_word_embeddings"] = "output.weight" not in self._file.tensors
        self.spec = read_family_spec(self.family, config, path)
        if (factors := self._file.tensors.get("rope_freqs.weight")) is not None:
            divisors = tuple(dequantize(factors, torch.float32).tolist())
            self.spec = self.spec.with_attention(lambda _, attention: _with_divisors(attention, divisors))
        self.weight_map: WeightMap = self.family.GGUF_WEIGHT_MAP
        self.quantization: Mapping[str, Any] | None = None
        self.num_bytes = {name: tensor.raw.nbytes for name, tensor in self._file.tensors.items()}

    def layout(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            name: torch.empty(tensor.shape, dtype=dtype, device="meta")
            for name, tensor in self._file.tensors.items()
        }

    def read(self, names: Iterable[str], dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
        for name in names:
            yield dequantize(self._file.tensors[name], dtype)

    def restore(self, address: str, tensor: Tensor) -> Tensor:
        return self.family.from_gguf(address, tensor, self.spec)


def _with_divisors(attention: AttentionSpec, divisors: tuple[float, ...]) -> AttentionSpec:
    """Return the spec with one divisor per RoPE frequency."""
    if attention.rope is None:
        return attention
    return dataclasses.replace(
        attention, rope=dataclasses.replace(attention.rope, scaling=FactorScaling(divisors))
    )
