"""Weight formats: one file each, found by the name that a checkpoint or the setting `quantization` gives."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

from models.errors import ModelError
from models.formats.base import WeightFormat

FORMATS = {
    "dense": "models.formats.dense",
    "int8": "models.formats.int8",
}


def stored_format(quantization: Mapping[str, Any]) -> WeightFormat:
    """Return the format of weights stored as this `quantization_config` says. Raises ModelError."""
    method = quantization.get("quant_method", "of unknown kind")
    if method not in FORMATS or _import(method).CONVERTS:
        raise ModelError(
            f"quantization '{method}' is not supported: its weights need a format that reads them (known: "
            f"{', '.join(FORMATS)}); use an unquantized version of the model"
        )
    return _import(method)


def conversion_to(name: str) -> WeightFormat:
    """Return the format that converts unquantized weights at load. Raises ModelError for unknown ones."""
    if name not in FORMATS or not _import(name).CONVERTS:
        known = [name for name in FORMATS if _import(name).CONVERTS]
        raise ModelError(f"quantization '{name}' is not known; known: {', '.join(known)}")
    return _import(name)


def _import(name: str) -> WeightFormat:
    return cast(WeightFormat, import_module(FORMATS[name]))
