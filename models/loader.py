"""Loads a checkpoint into a Decoder: streamed, straight to the device, each parameter filled exactly once."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from kernels.linear import computes_bfloat16
from models.checkpoint import Checkpoint, SafetensorsCheckpoint
from models.decoder import Decoder
from models.errors import ModelError
from models.formats import conversion_to, stored_format
from models.formats.base import WHOLE, LinearShape, LinearWeights, MakeLinear, Shard
from models.model_files import ModelFiles
from models.spec import DecoderSpec
from models.weight_names import Packed, is_excluded, target_of

__all__ = [
    "ModelError",
    "default_dtype",
    "empty_decoder",
    "load",
    "random_decoder",
    "random_tensors",
    "read_spec",
]

_NAMES_SHOWN = 5


def default_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the device multiplies it in hardware (CUDA; AMX, AVX512-BF16), else float32."""
    if device.type == "cpu" and not computes_bfloat16():
        return torch.float32
    return torch.bfloat16


def read_spec(files: ModelFiles) -> DecoderSpec:
    """Read the architecture of a model without its weights. Raises ModelError."""
    return _open(files).spec


def load(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantization: str | None = None,
    shard: Shard = WHOLE,
    on_progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Build the model and fill it from its checkpoint.

    `quantization` is the weight format to convert unquantized weights to, if any. `on_progress` gets bytes
    read so far and bytes in all. Raises ModelError, naming the tensor, when one is unknown, missing, there
    twice, or of another shape than the configuration says.
    """
    checkpoint = _open(files)
    make_linear = _linear_maker(checkpoint, quantization, dtype, device, shard)
    decoder = Decoder(checkpoint.spec, make_linear, dtype, device, shard)
    shapes = {address: shape for address, (_, _, shape) in decoder.parameters().items()}
    _fill(decoder, _renamed(checkpoint, shapes, dtype, on_progress))
    return decoder


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
    _fill(decoder, random_tensors(decoder, seed))
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
    convert = conversion_to(quantization or "dense")(dtype, device, shard)
    if stored is None:
        return convert
    if quantization is not None:
        raise ModelError(
            f"quantization '{quantization}' needs unquantized weights; these are quantized already"
        )
    read = stored_format(stored)(stored, dtype, device, shard)
    excluded = stored.get("modules_to_not_convert") or ()

    def make_linear(address: str, shape: LinearShape) -> LinearWeights:
        is_dense = is_excluded(address, checkpoint.weight_map, excluded)
        return convert(address, shape) if is_dense else read(address, shape)

    return make_linear


def _renamed(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint's tensors with their addresses in the decoder, in the decoder's layout."""
    done = 0
    for name, tensor, size in checkpoint.tensors(dtype):
        target = target_of(name, checkpoint.weight_map)
        # Some checkpoints store a tied output a second time.
        if target is not None and not (target == "output.weight" and checkpoint.spec.tie_embeddings):
            if checkpoint.quantization is None and not (tensor.is_floating_point() and tensor.itemsize >= 2):
                kind = str(tensor.dtype).removeprefix("torch.")
                raise ModelError(
                    f"{name} is quantized ({kind}), and config.json has no quantization_config that says how"
                )
            if isinstance(target, Packed):
                parts = target.divide(name, tensor, checkpoint.spec, shapes)
            else:
                parts = iter([(target, tensor)])
            for address, part in parts:
                yield address, checkpoint.restore(address, part)
        done += size
        if on_progress is not None:
            on_progress(min(done, checkpoint.total_bytes), checkpoint.total_bytes)
    if on_progress is not None:
        on_progress(checkpoint.total_bytes, checkpoint.total_bytes)  # headers and padding count, too


def _fill(decoder: Decoder, tensors: Iterator[tuple[str, Tensor]]) -> None:
    parameters = decoder.parameters()
    empty = dict.fromkeys(parameters)
    for address, tensor in tensors:
        if address not in parameters:
            raise ModelError(f"the checkpoint has a tensor the configuration has no place for: {address}")
        if address not in empty:
            raise ModelError(f"the checkpoint has {address} more than once")
        leaf, name, shape = parameters[address]
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{address} has the shape {list(tensor.shape)}; the configuration says {list(shape)}"
            )
        leaf.fill(name, tensor)
        del empty[address]
    if empty:
        names = list(empty)
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        raise ModelError(f"the checkpoint lacks {', '.join(names[:_NAMES_SHOWN])}{more}")
    decoder.finish()
