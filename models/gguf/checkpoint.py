"""A .gguf file, or several that are one model, as a checkpoint."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint import read_family_spec
from models.errors import ModelError
from models.gguf.architectures import conversion_of
from models.gguf.dequantize import check_type, dequantize
from models.gguf.file import GGUFFile, GGUFTensor
from models.gguf.metadata import Metadata
from models.gguf.parts import part_paths
from models.rope import FactorScaling, RopeScaling
from models.spec import AttentionSpec
from models.weight_names import WeightMap

_CPU = torch.device("cpu")


class GGUFCheckpoint:
    """A .gguf file, or all parts of one. The tensors are dequantized as they are read."""

    def __init__(self, path: Path) -> None:
        metadata, self._tensors = _read_parts(path)
        self.architecture = str(metadata.get("general.architecture", ""))
        try:
            self._conversion = conversion_of(metadata)
            config = self._conversion.config(Metadata(metadata))
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None
        except KeyError as error:
            raise ModelError(f"{path}: the metadata lacks {error}") from None
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            raise ModelError(f"{path}: the metadata makes no sense: {error}") from error
        self._check_counts(path, config)
        config["architectures"] = [self._conversion.name]
        config["tie_word_embeddings"] = "output.weight" not in self._tensors
        config["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
        config["mlp_bias"] = "blk.0.ffn_down.bias" in self._tensors
        if (long := self._floats("rope_factors_long.weight")) is not None:
            short = self._floats("rope_factors_short.weight")
            factors = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
            config["rope_parameters"] |= factors
        self.family = self._conversion.family
        self.spec = read_family_spec(self.family, config, path)
        if (divisors := self._floats("rope_freqs.weight")) is not None:
            scaling = FactorScaling(tuple(divisors))
            self.spec = self.spec.with_attention(lambda _, attention: _with_scaling(attention, scaling))
        self.weight_map: WeightMap = self._conversion.weight_map()
        self.quantization: Mapping[str, Any] | None = None
        self.num_bytes = {name: tensor.raw.nbytes for name, tensor in self._tensors.items()}

    def layout(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            name: torch.empty(tensor.shape, dtype=_dtype_of(tensor, dtype), device="meta")
            for name, tensor in self._tensors.items()
        }

    def read(self, names: Iterable[str], dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
        for name in names:
            tensor = self._tensors[name]
            yield dequantize(tensor, _dtype_of(tensor, dtype), device)

    def restore(self, address: str, tensor: Tensor) -> Tensor:
        return self._conversion.restore(address, tensor, self.spec)

    def _floats(self, name: str) -> list[float] | None:
        """Return the values of a tensor that is no weight, None if there is no such tensor."""
        tensor = self._tensors.get(name)
        return None if tensor is None else dequantize(tensor, torch.float32, _CPU).flatten().tolist()

    def _check_counts(self, path: Path, config: Mapping[str, Any]) -> None:
        """Raise ModelError before a spec of more layers or experts than there are tensors of is built."""
        layers = {name.split(".")[1] for name in self._tensors if name.startswith("blk.")}
        if config["num_hidden_layers"] != len(layers):
            said = config["num_hidden_layers"]
            raise ModelError(f"{path}: the metadata says {said!r} layers, and it has {len(layers)}")
        said = config.get("num_local_experts")
        for name, tensor in self._tensors.items():
            if name.endswith("_exps.weight") and tensor.shape[0] != said:
                raise ModelError(
                    f"{path}: the metadata says {said!r} experts, and {name} has {tensor.shape[0]}"
                )


def _read_parts(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Return the metadata of a model and the tensors of all its parts. Raises ModelError."""
    files = [GGUFFile(part) for part in part_paths(path)]
    metadata, tensors = files[0].metadata, {}
    for number, file in enumerate(files):
        said = file.metadata.get("split.no", 0), file.metadata.get("split.count") or 1
        if said != (number, len(files)):
            raise ModelError(
                f"{file.path}: the metadata says part {said[0]} (from 0) of {said[1]}, the file's name part "
                f"{number} of {len(files)}; parts are named NAME-00001-of-00003.gguf"
            )
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise ModelError(f"{file.path}: the tensor {name} is in another part, too")
            try:
                check_type(tensor)
            except ModelError as error:
                raise ModelError(f"{file.path}: {error}") from None
            tensors[name] = tensor
    if (count := metadata.get("split.tensors.count", len(tensors))) != len(tensors):
        raise ModelError(f"{path}: the metadata says {count} tensors in all parts, they have {len(tensors)}")
    return metadata, tensors


def _dtype_of(tensor: GGUFTensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to read a tensor in: vectors keep their precision, also if the model is of 16 bits."""
    return torch.float32 if len(tensor.shape) == 1 else dtype


def _with_scaling(attention: AttentionSpec, scaling: RopeScaling) -> AttentionSpec:
    """Return the spec with another scaling of its RoPE."""
    if attention.rope is None:
        return attention
    return dataclasses.replace(attention, rope=dataclasses.replace(attention.rope, scaling=scaling))
