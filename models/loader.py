"""Checkpoint tensors to a ready Decoder: streamed, straight to the device, each slot filled exactly once."""

import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels.linear import computes_bfloat16
from models.checkpoint import Checkpoint, SafetensorsCheckpoint
from models.decoder import Decoder
from models.errors import ModelError
from models.model_files import ModelFiles
from models.spec import DecoderSpec

__all__ = ["ModelError", "default_dtype", "load", "random_decoder", "random_tensors", "read_spec"]

_LAYER_NUMBER = re.compile(r"\.(\d+)\.")
_NAMES_SHOWN = 5


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies it in hardware (CUDA; AMX, AVX512-BF16), else float32."""
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
    on_progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Build the model and fill it from its checkpoint.

    `on_progress` gets bytes read so far and bytes in all. Raises ModelError, naming the tensor, when one is
    unknown, missing, there twice, or of another shape than the configuration says.
    """
    checkpoint = _open(files)
    decoder = Decoder(checkpoint.spec, dtype, device)
    _fill(decoder, _renamed(checkpoint, dtype, on_progress))
    return decoder


def random_decoder(spec: DecoderSpec, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Decoder:
    """Build a model with the weights of `random_tensors`."""
    decoder = Decoder(spec, dtype, device)
    _fill(decoder, random_tensors(decoder, seed))
    return decoder


def random_tensors(decoder: Decoder, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Tensors for the decoder's slots, made on its device: norms 1, the rest normal, keeping variance."""
    dtype, device = decoder.dtype, decoder.device
    generator = torch.Generator(device).manual_seed(seed)
    for address, (_, _, shape) in decoder.parameters().items():
        if address.endswith("norm.weight"):
            yield address, torch.ones(shape, dtype=dtype, device=device)
        else:
            values = torch.randn(shape, dtype=dtype, device=device, generator=generator)
            yield address, values.mul_(shape[-1] ** -0.5)


def _open(files: ModelFiles) -> Checkpoint:
    if files.format == "gguf":
        # Imported where it is needed: models with random weights and safetensors do without the gguf package.
        from models.gguf_checkpoint import GGUFCheckpoint

        return GGUFCheckpoint(files.weights)
    return SafetensorsCheckpoint(files.weights)


def _renamed(
    checkpoint: Checkpoint, dtype: torch.dtype, on_progress: Callable[[int, int], None] | None
) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors under the addresses of decoder slots, in the decoder's layout."""
    done = 0
    for name, tensor, size in checkpoint.tensors(dtype):
        slot = _slot(name, checkpoint.weight_map)
        # Some checkpoints store a tied output a second time.
        if slot is not None and not (slot == "output.weight" and checkpoint.spec.tie_embeddings):
            yield slot, checkpoint.restore(slot, tensor)
        done += size
        if on_progress is not None:
            on_progress(min(done, checkpoint.total_bytes), checkpoint.total_bytes)
    if on_progress is not None:
        on_progress(checkpoint.total_bytes, checkpoint.total_bytes)  # headers and padding count, too


def _slot(name: str, weight_map: dict[str, str | None]) -> str | None:
    """Translate a checkpoint's tensor name, or return None for one that is not needed."""
    stem, _, kind = name.rpartition(".")
    numbers = _LAYER_NUMBER.findall(f"{stem}.")
    pattern = _LAYER_NUMBER.sub(".*.", f"{stem}.").removesuffix(".")
    if pattern not in weight_map:
        raise ModelError(f"the checkpoint has a tensor this architecture does not know: {name}")
    target = weight_map[pattern]
    if target is None:
        return None
    for number in numbers:
        target = target.replace("*", number, 1)
    return f"{target}.{kind}"


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
