"""Checkpoints: a configuration, and tensors by name, streamed from safetensors files."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import torch
from torch import Tensor

from models.errors import ModelError
from models.families import Family, architectures_of, family_of, registered_names
from models.formats import stored_format
from models.safetensors_file import StoredTensor, read_header
from models.spec import DecoderSpec
from models.tensor_reader import read_tensors, same_values
from models.weight_names import WeightMap, is_known, target_of, with_prefix

logger = logging.getLogger("monoloop.models")

# The longest window of a published model. A number that is damaged would ask for a table of its angles.
_MAX_POSITIONS = 1 << 22

WHOLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class Checkpoint(Protocol):
    """A source of weights for the loader. `architecture` is the name that it gives its architecture."""

    architecture: str
    family: Family
    spec: DecoderSpec
    weight_map: WeightMap
    quantization: Mapping[str, Any] | None  # of the stored weights, as in `quantization_config`
    num_bytes: dict[str, int]  # of each tensor, as it is stored

    def layout(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return, on the device `meta`, the tensors that `read` yields, from the headers alone.

        Values that the checkpoint dequantizes itself are in `dtype`.
        """

    def read(self, names: Iterable[str], dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
        """Yield the values of each tensor in the order of `names`, on the device or the CPU.

        Raises ModelError, naming the file, when it cannot be read.
        """

    def restore(self, address: str, tensor: Tensor) -> Tensor:
        """Return the tensor at an address of the decoder in the decoder's layout."""


class SafetensorsCheckpoint:
    """A folder written by `save_pretrained`: config.json and one or several .safetensors files."""

    def __init__(self, folder: Path) -> None:
        config = read_json(folder / "config.json")
        self.quantization = config.get("quantization_config") or None
        if self.quantization is not None:
            if not isinstance(self.quantization, dict):
                raise ModelError(f"{folder}: the quantization_config is not a JSON object")
            try:
                stored_format(self.quantization)  # refuses an unknown one before anything is read
            except ModelError as error:
                raise ModelError(f"{folder}: {error}") from None
        names = architectures_of(config)
        self.family = family_of(names)
        self.architecture = next(name for name in names if name in registered_names())
        self.spec = read_family_spec(self.family, config, folder)
        self.weight_map: WeightMap = self.family.WEIGHT_MAP
        self._stored = self._headers(weight_files(folder))
        self.num_bytes = {name: tensor.num_bytes for name, tensor in self._stored.items()}
        if self.spec.tie_embeddings and self._has_own_output():
            logger.warning(
                "%s: the configuration ties the output to the embedding, but the checkpoint has different "
                "weights for both, which are used",
                folder,
            )
            self.spec = replace(self.spec, tie_embeddings=False)

    def layout(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in self._stored.items()
        }

    def read(self, names: Iterable[str], dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
        return read_tensors([self._stored[name] for name in names], device)

    def restore(self, address: str, tensor: Tensor) -> Tensor:
        return tensor

    def _headers(self, files: list[Path]) -> dict[str, StoredTensor]:
        """Return the tensors of all files by name. Raises ModelError."""
        found: dict[str, StoredTensor] = {}
        for file in files:
            for name, tensor in read_header(file).items():
                name = with_prefix(name, self.weight_map)
                if name in found:
                    raise ModelError(f"{name} is in two files, {found[name].file} and {file.name}")
                found[name] = tensor
        return found

    def _has_own_output(self) -> bool:
        """Check that the checkpoint stores an output whose weights are not those of the embedding."""
        found = {
            target_of(name, self.weight_map): tensor
            for name, tensor in self._stored.items()
            if is_known(name, self.weight_map)
        }
        embedding, output = found.get("embedding.weight"), found.get("output.weight")
        return embedding is not None and output is not None and not same_values(embedding, output)


def check_architecture(folder: Path) -> dict[str, Any]:
    """Return the configuration of a folder. Raises ModelError if its architecture is not supported."""
    config = read_json(folder / "config.json")
    try:
        family_of(architectures_of(config))
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None
    return config


def read_family_spec(family: Family, config: dict[str, Any], origin: Path) -> DecoderSpec:
    """Return the spec that a family reads from a configuration. Raises ModelError, naming its origin."""
    try:
        spec = family.spec(config)
        if not 1 <= spec.max_position <= _MAX_POSITIONS:
            raise ValueError(f"a context window of {spec.max_position} tokens")
        return spec
    except KeyError as error:
        raise ModelError(f"{origin}: the configuration lacks {error}") from None
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"{origin}: the configuration makes no sense: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the .safetensors files of a folder in name order. Raises ModelError if there are none."""
    whole = folder / WHOLE_FILE
    if (folder / INDEX_FILE).is_file():
        files = indexed_files(folder)
        if whole.is_file() and not all(file.is_file() for file in files):
            files = [whole]  # the index is left from the shards it was made of
    elif whole.is_file():
        files = [whole]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(f"{folder} lacks {', '.join(missing)}, which its index names")
    if files:
        return files
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise ModelError(
            f"{folder} has its weights only as pickle files (.bin, .pt), and reading a pickle runs whatever "
            "code is in it; take a safetensors version of the model, or convert it once with save_pretrained"
        )
    raise ModelError(f"{folder} holds no .safetensors file")


def indexed_files(folder: Path) -> list[Path]:
    """Return the files that the index of a folder names. Raises ModelError for names outside of it."""
    index = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(index, dict):
        raise ModelError(f"{folder / INDEX_FILE} has no weight_map")
    names = index.values()
    for name in names:
        if not isinstance(name, str) or not _stays_inside(name):
            raise ModelError(f"{folder / INDEX_FILE} points outside its folder: {name!r}")
    return sorted({folder / name for name in names})


def _stays_inside(name: str) -> bool:
    """Check the name only: in a hub cache the files are links to other folders, which is fine."""
    path = PurePosixPath(name.replace("\\", "/"))
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and ":" not in name


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ModelError, naming the file."""
    found = _read_json(path)
    if not isinstance(found, dict):
        raise ModelError(f"{path} is not a JSON object")
    return found


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Read a JSON list of objects. Raises ModelError, naming the file."""
    found = _read_json(path)
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise ModelError(f"{path} is not a JSON list of objects")
    return found


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (OSError, RecursionError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
