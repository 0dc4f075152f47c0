"""Checkpoints: a configuration, and tensors by name, streamed from safetensors files."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from models.config_check import check_config, check_spec
from models.errors import ModelError
from models.families import Family, architectures_of, family_of, registered_names
from models.formats import stored_format
from models.json_files import read_json
from models.safetensors_file import StoredTensor, read_header
from models.spec import DecoderSpec
from models.tensor_reader import read_tensors, same_values
from models.weight_files import INDEX_FILE, read_index, weight_files, what_it_holds
from models.weight_names import WeightMap, is_known, target_of, with_prefix

logger = logging.getLogger("monoloop.models")

CONFIG_FILE = "config.json"
_MODELOPT_FILE = "hf_quant_config.json"


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
        config, self.spec = read_config(folder)
        self.quantization = config.get("quantization_config") or None
        names = config["architectures"]
        self.family = family_of(names)
        self.architecture = next(name for name in names if name in registered_names())
        self.weight_map: WeightMap = self.family.WEIGHT_MAP
        self._stored = self._headers(folder)
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

    def _headers(self, folder: Path) -> dict[str, StoredTensor]:
        """Return the tensors of all files by name. Raises ModelError, also if the index contradicts them."""
        found: dict[str, StoredTensor] = {}
        for file in weight_files(folder):
            for name, tensor in read_header(file).items():
                if name in found:
                    raise ModelError(
                        f"{folder}: {name} is in two files, {found[name].file.name} and {file.name}"
                    )
                found[name] = tensor
        for name, file_name in (read_index(folder) or {}).items():
            if name not in found:
                raise ModelError(f"{folder / INDEX_FILE} says that {name} is in {file_name}; no file has it")
            if found[name].file != folder / file_name:
                other = found[name].file.name
                raise ModelError(
                    f"{folder / INDEX_FILE} says that {name} is in {file_name}; it is in {other}"
                )
        return {with_prefix(name, self.weight_map): tensor for name, tensor in found.items()}

    def _has_own_output(self) -> bool:
        """Check that the checkpoint stores an output whose weights are not those of the embedding."""
        found = {
            target_of(name, self.weight_map): tensor
            for name, tensor in self._stored.items()
            if is_known(name, self.weight_map)
        }
        embedding, output = found.get("embedding.weight"), found.get("output.weight")
        return embedding is not None and output is not None and not same_values(embedding, output)


def read_config(folder: Path) -> tuple[dict[str, Any], DecoderSpec]:
    """Return the configuration of a folder, and the architecture that it describes.

    Raises ModelError if there is none, or its architecture or the format of its weights is not supported.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise ModelError(f"{folder} has no {CONFIG_FILE}{what_it_holds(folder)}")
    config = read_json(folder / CONFIG_FILE)
    if (quantization := _quantization_beside(config, folder)) is not None:
        config["quantization_config"] = quantization
    try:
        config["architectures"] = architectures_of(config)
        family = family_of(config["architectures"])
        _check_quantization(config)
    except ModelError as error:
        code = "; code that comes with a model (auto_map) is not run" if config.get("auto_map") else ""
        raise ModelError(f"{folder}: {error}{code}") from None
    return config, read_family_spec(family, config, folder)


def _quantization_beside(config: Mapping[str, Any], folder: Path) -> Any:
    """Return the quantization_config that a tool wrote in another place than that, if any."""
    if config.get("quantization_config"):
        return None
    if config.get("compression_config"):  # compressed-tensors before its version 0.5
        return config["compression_config"]
    if (folder / _MODELOPT_FILE).is_file():
        return {"quant_method": "modelopt", **read_json(folder / _MODELOPT_FILE)}
    return None


def _check_quantization(config: dict[str, Any]) -> None:
    """Raise ModelError if the weights are quantized in a format that is not supported."""
    for key in ("quantization_config", "quantization"):  # MLX writes its own form under both
        quantization = config.get(key)
        if quantization in (None, {}):
            continue
        if not isinstance(quantization, dict):
            raise ModelError(f"the {key} is not a JSON object")
        stored_format(quantization)
        return


def read_family_spec(family: Family, config: dict[str, Any], origin: Path) -> DecoderSpec:
    """Return the spec that a family reads from a configuration. Raises ModelError, naming its origin."""
    try:
        check_config(config)
        spec = family.spec(config)
        check_spec(spec)
    except ModelError as error:
        raise ModelError(f"{origin}: {error}") from None
    except KeyError as error:
        raise ModelError(f"{origin}: the configuration lacks {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{origin}: the configuration makes no sense: {error}") from error
    return spec
