"""Weights of eight bits as compressed-tensors stores them: float-quantized, int-quantized, naive-quantized.

weight float8_e4m3fn or int8 [out_features, in_features]; weight_scale [out_features, 1], or [1] of a tensor;
static activations have input_scale [1]. Products whose activations have a zero point are weight-only here,
which is nearer to the model before its quantization. Blocks of 128 x 128 have weight_scale [out_features /
128, in_features / 128], rounded up, and activations in groups of 128 inputs of a token.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from kernels.block_linear import BLOCK
from models.errors import ModelError
from models.formats.base import LinearShape, MakeStored, Shard
from models.formats.fp8_blocks import BlockWeights
from models.formats.stored_scaled_rows import Storage, StoredScaledRows

_DTYPES = {"float": torch.float8_e4m3fn, "int": torch.int8}
_BLOCKS = Storage(torch.float8_e4m3fn, scale_of="block", inputs="token")
_OF_BLOCKS = {"type": "float", "num_bits": 8, "block_structure": [BLOCK, BLOCK]}
_INPUTS_OF_BLOCKS = {
    "type": "float",
    "num_bits": 8,
    "symmetric": True,
    "dynamic": True,
    "strategy": "group",
    "group_size": BLOCK,
}
_SCALE_OF: dict[str, Literal["feature", "tensor"]] = {"channel": "feature", "tensor": "tensor"}


def scheme(
    weights: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
    inputs: Mapping[str, Any] | None = None,
) -> MakeStored:
    """Return a maker of linears whose weights and inputs have these QuantizationArgs.

    Raises ModelError for others.
    """
    if weights.get("strategy") == "block":
        if {**weights, **_OF_BLOCKS} != weights or {**(inputs or {}), **_INPUTS_OF_BLOCKS} != inputs:
            raise ModelError(
                f"blocks are supported for fp8 in [{BLOCK}, {BLOCK}] with dynamic activations in groups of "
                f"{BLOCK}"
            )
        return lambda modules, shape: BlockWeights(modules, shape, dtype, device, shard, _BLOCKS)
    kind, strategy = str(weights.get("type", "int")), _strategy(weights)
    if kind not in _DTYPES:
        raise ModelError(f"weights of type {kind!r} are not supported; {' and '.join(_DTYPES)} are")
    _check_bits("weights", weights)
    if strategy not in _SCALE_OF:
        raise ModelError(
            f"weights of eight bits with the strategy {strategy!r} are not supported; "
            f"{', '.join(_SCALE_OF)} and block are"
        )
    if weights.get("symmetric", True) is False:
        raise ModelError("weights of eight bits with zero points are not supported; symmetric ones are")
    rounding, unread = _inputs(kind, inputs)
    fallback = (
        "activations with zero points are not quantized" if inputs and rounding == "unquantized" else None
    )
    storage = Storage(_DTYPES[kind], _SCALE_OF[strategy], rounding, unread, fallback)

    def make_linear(modules: Sequence[str], shape: LinearShape) -> StoredScaledRows:
        return StoredScaledRows(modules, shape, dtype, device, shard, storage)

    return make_linear


def _inputs(
    kind: str, args: Mapping[str, Any] | None
) -> tuple[Literal["token", "static", "unquantized"], tuple[str, ...]]:
    """Return what products do with their inputs, and the tensors that are stored for them and not used."""
    if not args:
        return "unquantized", ()
    _check_bits("input_activations", args)
    if args.get("type", "int") != kind:
        raise ModelError(f"weights of type {kind!r} with input_activations of another are not supported")
    is_dynamic, has_zero_point = bool(args.get("dynamic")), args.get("symmetric", True) is False
    strategy = args.get("strategy") or ("token" if is_dynamic else "tensor")
    if strategy != "tensor" and not (is_dynamic and strategy == "token"):
        raise ModelError(f"input_activations with the strategy {strategy!r} are not supported")
    if has_zero_point:
        return "unquantized", () if is_dynamic else ("input_scale", "input_zero_point")
    return ("token" if is_dynamic else "static"), ()


def _check_bits(what: str, args: Mapping[str, Any]) -> None:
    if args.get("num_bits", 8) != 8:
        raise ModelError(f"{what} of {args['num_bits']!r} bits are not supported; eight bits are")


def _strategy(weights: Mapping[str, Any]) -> str:
    if weights.get("strategy"):
        return str(weights["strategy"])
    size = weights.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"
