"""Loads a checkpoint into a Decoder: checked from its headers, then read in parallel to the device."""

import logging
import resource
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.linear import computes_bfloat16
from models.checkpoint import Checkpoint, SafetensorsCheckpoint, read_config
from models.config_check import check_experts
from models.decoder import Decoder
from models.errors import ModelError
from models.formats import conversion_to, stored_format
from models.formats.base import EMBEDDING, OUTPUT_HEAD, WHOLE, LinearShape, LinearWeights, MakeLinear, Shard
from models.kv_scales import read_kv_scales
from models.layers import LinearLeaf
from models.model_files import ModelFiles
from models.placement import listed, parts_of, place
from models.progress import byte_progress
from models.spec import DecoderSpec
from models.weight_names import is_excluded, modules_of, names_under

__all__ = [
    "ModelError",
    "default_dtype",
    "empty_decoder",
    "is_quantized",
    "load",
    "outline",
    "random_decoder",
    "random_tensors",
    "read_spec",
]

logger = logging.getLogger("monoloop.models")

_META = torch.device("meta")
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024  # the unit of ru_maxrss


def default_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the device multiplies it in hardware (CUDA; AMX, AVX512-BF16), else float32."""
    if device.type == "cpu" and not computes_bfloat16():
        return torch.float32
    return torch.bfloat16


def read_spec(files: ModelFiles) -> DecoderSpec:
    """Read the architecture of a model without its weights. Raises ModelError."""
    return _open(files).spec


def is_quantized(files: ModelFiles) -> bool:
    """Return True if a checkpoint keeps its weights quantized when it is loaded; blocks of GGUF do not stay.

    Raises ModelError.
    """
    return files.format != "gguf" and bool(read_config(files.weights)[0].get("quantization_config"))


def load(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantization: str | None = None,
    shard: Shard = WHOLE,
    kv_scales: bool = False,
    progress: bool = False,
) -> Decoder:
    """Build the model and fill it from its checkpoint.

    `quantization` is the weight format to convert unquantized weights to, if any. With `kv_scales`
    those that the checkpoint stores for KV in fp8 are read. `progress` shows a bar if
    standard error is a terminal. Host memory grows by the buffers of `models.tensor_reader`; on a CPU by the
    weights, which stay there, and the few tensors that are read at once.

    Raises ModelError, naming the tensors, when some are unknown, missing, there twice, or of another shape
    than the configuration says: before any is read and before memory is allocated.
    """
    started = time.perf_counter()
    checkpoint = _open(files)
    names = _names(files, checkpoint, dtype, quantization, shard)
    decoder = _build(checkpoint, dtype, device, quantization, shard)
    if kv_scales:
        decoder.kv_scales = read_kv_scales(checkpoint)
    total = sum(checkpoint.num_bytes[name] for name in names)
    with byte_progress(f"loading {files.name}", total, shown=progress, stays=False) as report:
        done, infinite = 0, []
        tensors = checkpoint.read(names, dtype, device)
        for name, tensor in _fill(decoder, checkpoint, zip(names, tensors, strict=True)):
            if dtype == torch.float16 and _exceeds_float16(tensor):
                infinite.append(name)
            done += checkpoint.num_bytes[name]
            report(done)
    if infinite:
        logger.warning(
            "%s: values of %s are infinite in float16; load with bfloat16 or float32 instead",
            files.weights,
            listed(infinite),
        )
    for text, count in _fallbacks(decoder).items():
        logger.warning("%s: %d linears: %s", files.weights, count, text)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    logger.info(
        "loaded %.2f GB of weights in %.1f s (%.2f GB/s); peak host memory %.2f GB",
        total / 1e9,
        seconds,
        total / 1e9 / seconds,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES / 1e9,
    )
    return decoder


class Outline(NamedTuple):
    """A model whose tensors are on the device `meta`.

    `architecture` is the name in its checkpoint, `quantization` the format of its weights, None if they are
    not quantized.
    """

    model: Decoder
    architecture: str
    quantization: str | None


def outline(files: ModelFiles, dtype: torch.dtype, *, quantization: str | None = None) -> Outline:
    """Build a model from the headers of its checkpoint: it has all tensors that load() makes, without values.

    Raises ModelError like load().
    """
    checkpoint = _open(files)
    names = _names(files, checkpoint, dtype, quantization, WHOLE)
    decoder = _build(checkpoint, dtype, _META, quantization, WHOLE)
    layout = checkpoint.layout(dtype)
    deque(_fill(decoder, checkpoint, ((name, layout[name]) for name in names)), maxlen=0)
    stored = (checkpoint.quantization or {}).get("quant_method")
    return Outline(decoder, checkpoint.architecture, quantization or stored)


def random_decoder(
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    quantization: str | None = None,
    shard: Shard = WHOLE,
) -> Decoder:
    """Build a model with the weights of `random_tensors`."""
    decoder = empty_decoder(spec, dtype, device, quantization=quantization, shard=shard)
    parameters = decoder.parameters()
    for address, tensor in random_tensors(decoder, seed):
        leaf, parameter, _ = parameters[address]
        leaf.fill(parameter, tensor)
    decoder.finish()
    return decoder


def empty_decoder(
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantization: str | None = None,
    shard: Shard = WHOLE,
) -> Decoder:
    """Build a model whose parameters are not filled yet."""
    make_linear = conversion_to(quantization or "dense")(dtype, device, shard)
    return Decoder(spec, make_linear, dtype, device, shard)


def random_tensors(decoder: Decoder, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield a random tensor for each parameter, made on the decoder's device.

    Norms are 1; floats of linears are normal and keep the variance of their input.
    """
    generator = torch.Generator(decoder.device).manual_seed(seed)
    for address, (leaf, name, _) in decoder.parameters().items():
        yield address, leaf.random(name, generator)


def _open(files: ModelFiles) -> Checkpoint:
    if files.format == "gguf":
        # Imported only here: models with random weights and safetensors do without the gguf package.
        from models.gguf.checkpoint import GGUFCheckpoint

        return GGUFCheckpoint(files.weights)
    return SafetensorsCheckpoint(files.weights)


def _linear_maker(
    checkpoint: Checkpoint, quantization: str | None, dtype: torch.dtype, device: torch.device, shard: Shard
) -> MakeLinear:
    """Return the maker of the model's linears: in the checkpoint's format, or in the one to convert to."""
    stored = checkpoint.quantization
    if stored is not None and quantization is not None:
        raise ModelError(
            f"quantization '{quantization}' needs unquantized weights; these are quantized already "
            f"({stored.get('quant_method')}), so leave it out"
        )
    convert = conversion_to(quantization or "dense")(dtype, device, shard)
    if stored is None:
        return convert
    with _quantization_config():
        read = stored_format(stored)(stored, dtype, device, shard)
        excluded = names_under("modules_to_not_convert", stored)
    tensors = checkpoint.num_bytes.keys()
    filled = tensors | {name.rpartition(".")[0] for name in tensors}

    def make_linear(address: str, shape: LinearShape) -> LinearWeights:
        if address == EMBEDDING:
            return convert(address, shape)
        modules = modules_of(address, checkpoint.weight_map, filled)
        is_tied = address == OUTPUT_HEAD and checkpoint.spec.tie_embeddings
        if is_tied or is_excluded(modules, excluded):
            return convert(address, shape)
        with _quantization_config():
            return read(modules, shape)

    return make_linear


@contextmanager
def _quantization_config() -> Iterator[None]:
    """Raise ModelError for values of another type than a format expects."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"the quantization_config makes no sense: {error}") from error


def _build(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, quantization: str | None, shard: Shard
) -> Decoder:
    make_linear = _linear_maker(checkpoint, quantization, dtype, device, shard)
    return Decoder(checkpoint.spec, make_linear, dtype, device, shard)


def _names(
    files: ModelFiles, checkpoint: Checkpoint, dtype: torch.dtype, quantization: str | None, shard: Shard
) -> list[str]:
    """Return the names of the tensors to load. Raises ModelError if the configuration has others."""
    try:
        check_experts(checkpoint.spec, sum(checkpoint.num_bytes.values()))
        return place(checkpoint, _shapes(_build(checkpoint, dtype, _META, quantization, shard)), dtype)
    except ModelError as error:
        raise ModelError(f"{files.weights}: {error}") from None


def _fill(
    decoder: Decoder, checkpoint: Checkpoint, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Fill the decoder from a checkpoint's tensors and complete it; yield each, with its name, when done."""
    parameters, shapes = decoder.parameters(), _shapes(decoder)
    for name, tensor in tensors:
        for address, part in parts_of(checkpoint, name, tensor, shapes):
            leaf, parameter, _ = parameters[address]
            leaf.fill(parameter, part)
        yield name, tensor
    decoder.finish()


def _fallbacks(decoder: Decoder) -> Counter[str]:
    """Return what formats do in another way than they say, and of how many linears."""
    linears = (leaf for _, leaf in decoder.leaves() if isinstance(leaf, LinearLeaf))
    return Counter(leaf.weights.fallback for leaf in linears if leaf.weights.fallback is not None)


def _exceeds_float16(tensor: Tensor) -> bool:
    """Return True if values are beyond the range of float16."""
    # fp8 is within that range, and torch finds no minimum of it.
    is_narrow = tensor.dtype == torch.float16 or tensor.itemsize == 1
    if is_narrow or not tensor.is_floating_point() or not tensor.numel():
        return False
    limit = torch.finfo(torch.float16).max
    low, high = tensor.aminmax()
    return bool(low < -limit or high > limit)


def _shapes(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    return {address: shape for address, (_, _, shape) in decoder.parameters().items()}
