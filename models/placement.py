"""Decides from the headers of a checkpoint which tensor fills which parameter, before weights are read."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from models.checkpoint import Checkpoint
from models.errors import ModelError
from models.weight_names import Packed, is_known, layer_of, names_of, pattern_of, target_of

Shapes = Mapping[str, tuple[int, ...]]
"""Address of each parameter in the decoder -> its shape."""

_NAMES_SHOWN = 5
# Ends of names of tensors that only quantized weights have.
_OF_QUANTIZED = (
    "qweight",
    "qzeros",
    "scales",
    "_packed",
    "_scale",
    "_scale_inv",
    ".scale",
    "_blocks",
    "absmax",
    "SCB",
)


def parts_of(
    checkpoint: Checkpoint, name: str, tensor: Tensor, shapes: Shapes
) -> Iterator[tuple[str, Tensor]]:
    """Yield the addresses that a checkpoint's tensor fills, each with its part in the decoder's layout.

    The tensor may be on the device `meta`; nothing is yielded for one that is not loaded. Raises ModelError.
    """
    target = target_of(name, checkpoint.weight_map)
    if isinstance(target, Packed):
        parts = target.divide(name, tensor, checkpoint.spec, shapes)
    # Some checkpoints store a tied output a second time.
    elif target is None or (target == "output.weight" and checkpoint.spec.tie_embeddings):
        return
    else:
        parts = iter([(target, tensor)])
    for address, part in parts:
        yield address, _fitted(address, checkpoint.restore(address, part), shapes)


def _fitted(address: str, tensor: Tensor, shapes: Shapes) -> Tensor:
    """Return scales of quantized weights in the shape of their parameter, others as they are.

    Tools store the scale of a whole tensor as [] or [1], and scales of rows as [n] or [n, 1].
    """
    shape = shapes.get(address, ())
    is_scale = address.endswith(("scale", "_scale_inv"))
    sizes = [size for size in tensor.shape if size != 1]
    return tensor.reshape(shape) if is_scale and sizes == [size for size in shape if size != 1] else tensor


def place(checkpoint: Checkpoint, shapes: Shapes, dtype: torch.dtype) -> list[str]:
    """Return the names of the tensors to load, which together fill each parameter exactly once.

    `dtype` is that of tensors which the checkpoint dequantizes itself. Raises ModelError, naming tensors,
    when some are missing, unknown, there twice, of another shape than the configuration says, or not floats.
    """
    names: list[str] = []
    filled: dict[str, str] = {}
    surplus: list[str] = []
    misshapen: list[str] = []
    spec = checkpoint.spec
    reads_order = any(address.endswith("g_idx") for address in shapes)
    orders: list[str] = []
    skipped_layers = range(spec.num_layers, spec.num_layers + spec.num_mtp_layers)
    for name, tensor in checkpoint.layout(dtype).items():
        if layer_of(name) in skipped_layers:
            continue
        if not is_known(name, checkpoint.weight_map):
            surplus.append(name)
            continue
        if name.endswith("g_idx") and not reads_order:
            orders.append(name)
            continue
        parts = dict(parts_of(checkpoint, name, tensor, shapes))
        if parts and not parts.keys() <= shapes.keys():
            surplus.append(name)
            continue
        if parts and checkpoint.quantization is None:
            _check_dtype(name, tensor.dtype)
        for address, part in parts.items():
            if address in filled:
                raise ModelError(f"{name} and {filled[address]} fill the same parameter, {address}")
            filled[address] = name
            if tuple(part.shape) != shapes[address]:
                misshapen.append(
                    f"{name} has the shape {list(part.shape)}; the configuration says {list(shapes[address])}"
                )
        if parts:
            names.append(name)
    if orders:
        surplus += _scattered(orders, checkpoint, dtype)
    _check_all_filled([address for address in shapes if address not in filled], surplus, checkpoint)
    if misshapen:
        others = f" ({len(misshapen) - 1} more differ as well)" if misshapen[1:] else ""
        raise ModelError(misshapen[0] + others)
    return names


def _scattered(names: list[str], checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[str]:
    """Yield those of the g_idx, the group of each input, that are not the inputs' own order."""
    for name, groups in zip(names, checkpoint.read(names, dtype, torch.device("cpu")), strict=True):
        size = max(1, int((groups == 0).sum()))
        if not torch.equal(groups.long(), torch.arange(groups.numel()) // size):
            yield name


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    """Check that a tensor of an unquantized checkpoint has floats of 16 bits or more. Raises ModelError."""
    kind = str(dtype).removeprefix("torch.")
    if dtype == torch.bool or (not dtype.is_floating_point and dtype.itemsize > 1):
        raise ModelError(f"{name} holds {kind}, and weights are floats")
    if dtype.itemsize == 1:
        raise ModelError(
            f"{name} is quantized ({kind}), and config.json has no quantization_config that says how"
        )


def _check_all_filled(empty: Iterable[str], surplus: list[str], checkpoint: Checkpoint) -> None:
    """Raise ModelError if there are empty parameters, by address, or surplus tensors, by name."""
    missing: dict[str, None] = {}  # names in the checkpoint, each once
    stored = {pattern_of(name) for name in checkpoint.num_bytes}
    for address in empty:
        stem, _, kind = address.rpartition(".")
        single = [f"{name}.{kind}" for name in names_of(stem, checkpoint.weight_map)]
        stacked = names_of(address, checkpoint.weight_map)
        has_single = any(pattern_of(name) in stored for name in single)
        missing |= dict.fromkeys(single if has_single or not stacked else stacked)
    faults = []
    if missing:
        faults.append(f"the checkpoint lacks {listed(missing)}")
    if surplus:
        faults.append(f"the configuration has no place for {listed(surplus)}")
    if checkpoint.quantization is None and any(name.endswith(_OF_QUANTIZED) for name in surplus):
        faults.append("the weights look quantized, and config.json has no quantization_config that says how")
    if missing.keys() == {"lm_head.weight"} and not surplus:
        faults.append("tie_word_embeddings is false, so the output cannot be taken from the embedding")
    if faults:
        raise ModelError("; ".join(faults))


def listed(names: Iterable[str]) -> str:
    """Return the first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _NAMES_SHOWN} more tensors" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
