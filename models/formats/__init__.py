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
    "auto-round": "models.formats.auto_round:stored",
    "awq": "models.formats.awq:stored",
    "compressed-tensors": "models.formats.compressed_tensors:stored",
    "fbgemm_fp8": "models.formats.fbgemm_fp8:stored",
    "fp8": "models.formats.fp8:stored",
    "gptq": "models.formats.gptq:stored",
    "modelopt": "models.formats.modelopt:stored",
    "mxfp4": "models.formats.mxfp4:stored",
    "smooth_quant": "models.formats.smooth_quant:stored",
}

# Value of the setting `quantization` -> a Conversion, imported when it is used.
CONVERSIONS = {
    "dense": "models.formats.dense:conversion",
    "fp16": "models.formats.fp16:conversion",
    "fp8": "models.formats.fp8:conversion",
    "int4": "models.formats.int4:conversion",
    "int8": "models.formats.int8:conversion",
}


_FOUR_BITS = "an AWQ or GPTQ version of the model, or the unquantized one with --quantization int4"
_EIGHT_BITS = "the unquantized model with --quantization fp8 or int8"

# `quant_method` of a checkpoint that is not read -> what its weights are, and what to use in its place.
# Formats that have several layouts refuse some of them with these words, too: see `refusal`.
REFUSED = {
    "aqlm": ("AQLM, additive codebooks", _FOUR_BITS),
    "bitnet": ("BitNet, ternary weights", "the unquantized model"),
    "bitsandbytes": ("bitsandbytes, NF4, FP4 or LLM.int8", _FOUR_BITS),
    "eetq": ("EETQ, int8 in an order of its kernels", _EIGHT_BITS),
    "exl2": ("ExLlamaV2, mixed bits", _FOUR_BITS),
    "exl3": ("ExLlamaV3, trellis codes", _FOUR_BITS),
    "fouroversix": ("Four Over Six, NVFP4", _FOUR_BITS),
    "fp_quant": ("FP-Quant, rotated MXFP4 or NVFP4", _FOUR_BITS),
    "gemma": ("mixed bits of Gemma", "the unquantized model with --quantization int4 or int8"),
    "gguf": ("GGUF", "the path of the .gguf file as the model"),
    "higgs": ("HIGGS, grids of rotated weights", _FOUR_BITS),
    "hqq": ("HQQ, half-quadratic quantization", _FOUR_BITS),
    "marlin": ("the order of Marlin's kernels", _FOUR_BITS),
    "metal": ("the order of Metal kernels", _FOUR_BITS),
    "mlx": ("MLX, integers with scales and biases", _FOUR_BITS),
    "mxfp8": ("MXFP8", _EIGHT_BITS),
    "nvfp4": ("NVFP4, FP4 with FP8 scales", _FOUR_BITS),
    "quanto": ("Quanto", _EIGHT_BITS),
    "quark": ("AMD Quark", _FOUR_BITS),
    "quip": ("QuIP, rotated weights", _FOUR_BITS),
    "quip_sharp": ("QuIP#, lattice codebooks", _FOUR_BITS),
    "sinq": ("SINQ, scales of rows and columns", _FOUR_BITS),
    "spqr": ("SpQR, sparse outliers", _FOUR_BITS),
    "torchao": (
        "torchao, serialized tensor classes",
        "the unquantized model with --quantization int4 or int8",
    ),
    "vptq": ("VPTQ, vector codebooks", _FOUR_BITS),
}

_OTHER_NAMES = {"auto_round": "auto-round", "intel/auto-round": "auto-round", "quip#": "quip_sharp"}

# Keys of a quantization_config whose values have keys themselves.
_OBJECTS = ("config_groups", "dynamic", "extra_config", "quantization", "sparsity_config", "transform_config")
_OF_MODULES = ("dynamic", "extra_config")  # those with options of single modules


def stored_format(quantization: Mapping[str, Any]) -> StoredFormat:
    """Return the format of weights stored as this `quantization_config` says. Raises ModelError."""
    method = _method(quantization)
    if method not in STORED:
        raise refusal(method)
    for key in _OBJECTS:
        _check_object(key, quantization.get(key))
    for key in _OF_MODULES:
        for name, options in (quantization.get(key) or {}).items():
            _check_object(f"{key}: {name}", options)
    return cast(StoredFormat, resolve_name(STORED[method]))


def _check_object(key: str, value: Any) -> None:
    if value and not isinstance(value, Mapping):
        raise ModelError(f"'{key}' of the quantization_config is not a JSON object")


def refusal(method: str, name: str | None = None) -> ModelError:
    """Return the error for weights in a format that is not read, with what to use in its place.

    `name` is what the configuration calls it, if that is not the method's name.
    """
    if method in REFUSED:
        what, instead = REFUSED[method]
        name = name or f"quantization '{method}'"
        return ModelError(f"{name} ({what}) is not supported; use {instead}")
    return ModelError(
        f"quantization '{method}' is not supported (supported in checkpoints: "
        f"{', '.join(STORED) or 'none'}); use an unquantized version of the model"
    )


def _method(quantization: Mapping[str, Any]) -> str:
    """Return the name of the method, also of tools and versions that do not write `quant_method`."""
    if "quant_method" in quantization:
        method = str(quantization["quant_method"]).lower()
        return _OTHER_NAMES.get(method, method)
    if quantization.get("load_in_4bit") or quantization.get("load_in_8bit"):
        return "bitsandbytes"
    return "mlx" if "group_size" in quantization else "of unknown kind"


def conversion_to(name: str) -> Conversion:
    """Return the format that converts unquantized weights at load. Raises ModelError for unknown ones."""
    if name not in CONVERSIONS:
        raise ModelError(f"quantization '{name}' is not known; known: auto, {', '.join(CONVERSIONS)}")
    return cast(Conversion, resolve_name(CONVERSIONS[name]))
