"""Checkpoints: a configuration, and tensors by name, streamed from safetensors files."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.errors import ModelError
from models.families import Family, architectures_of, family_of
from models.formats import stored_format
from models.spec import DecoderSpec
from models.weight_names import with_prefix

INDEX_FILE = "model.safetensors.index.json"


class Checkpoint(Protocol):
    """A source of weights for the loader."""

    family: Family
    spec: DecoderSpec
    weight_map: dict[str, str | None]
    quantization: Mapping[str, Any] | None  # of the stored weights, as in `quantization_config`
    total_bytes: int

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, int]]:
        """Yield name, values on the CPU and bytes on disk of each tensor.

        Values that the checkpoint dequantizes itself are in `dtype`.
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
        self.family = family_of(architectures_of(config))
        self.spec = read_family_spec(self.family, config, folder)
        self.weight_map = self.family.WEIGHT_MAP
        self._files = weight_files(folder)
        self.total_bytes = sum(file.stat().st_size for file in self._files)

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, int]]:
        for file in self._files:
            try:
                with safe_open(file, framework="pt", device="cpu") as opened:
                    for name in opened.keys():  # noqa: SIM118 - not a mapping
                        tensor = opened.get_tensor(name)
                        yield with_prefix(name, self.weight_map), tensor, tensor.nbytes
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} cannot be read: {error}") from error

    def restore(self, address: str, tensor: Tensor) -> Tensor:
        return tensor


def read_family_spec(family: Family, config: dict[str, Any], origin: Path) -> DecoderSpec:
    """Return the spec that a family reads from a configuration. Raises ModelError, naming its origin."""
    try:
        return family.spec(config)
    except KeyError as error:
        raise ModelError(f"{origin}: the configuration lacks {error}") from None
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"{origin}: the configuration makes no sense: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the .safetensors files of a folder in name order. Raises ModelError if there are none."""
    whole = folder / "model.safetensors"
    if (folder / INDEX_FILE).is_file():
        files = _indexed_files(folder)
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


def _indexed_files(folder: Path) -> list[Path]:
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
