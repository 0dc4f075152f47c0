"""Weight formats: one file each, found by the name that a checkpoint or the setting `quantization` gives.

A name may be in both registries: stored and converted weights of it need not have the same tensors.
"""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, cast

from models.errors import ModelError
from models.formats.base import Conversion, StoredFormat

# `quant_method` of a checkpoint's quantization_config -> a StoredFormat, imported when it is used.
STORED = {
    "awq": "models.formats.awq:stored",
    "compressed-tensors": "models.formats.compressed_tensors:stored",
    "gptq": "models.formats.gptq:stored",
    "mxfp4": "models.formats.mxfp4:stored",
}

# Value of the setting `quantization` -> a Conversion, imported when it is used.
CONVERSIONS = {
    "dense": "models.formats.dense:conversion",
    "int4": "models.formats.int4:conversion",
    "int8": "models.formats.int8:conversion",
}


def stored_format(quantization: Mapping[str, Any]) -> StoredFormat:
    """Return the format of weights stored as this `quantization_config` says. Raises ModelError."""
    method = str(quantization.get("quant_method", "of unknown kind"))
    if method not in STORED:
        raise ModelError(
            f"quantization '{method}' is not supported (supported in checkpoints: "
            f"{', '.join(STORED) or 'none'}); use an unquantized version of the model"
        )
    return cast(StoredFormat, resolve_name(STORED[method]))


def conversion_to(name: str) -> Conversion:
    """Return the format that converts unquantized weights at load. Raises ModelError for unknown ones."""
    if name not in CONVERSIONS:
        raise ModelError(f"quantization '{name}' is not known; known: {', '.join(CONVERSIONS)}")
    return cast(Conversion, resolve_name(CONVERSIONS[name]))
