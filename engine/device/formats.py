"""Chooses the formats of weights, activations, keys and values where the settings leave them open.

On a GPU they are the checkpoint's own. A CPU reads less memory for weights of 8 bits, and its compiled
kernels multiply them by activations in float32; without these kernels the candidates are timed.
"""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch

from engine.config import EngineConfig
from engine.device.devices import set_up_thread
from engine.errors import ModelError
from kernels.cpu import compiler
from kernels.cpu.dot_products import num_lanes
from models import loader
from models.formats import conversion_to
from models.formats.base import WHOLE, LinearShape
from models.layers import Linear
from models.model_files import ModelFiles
from models.spec import DecoderSpec, MoeSpec

logger = logging.getLogger("monoloop.engine")

Timer = Callable[[Callable[[], object]], float]
"""Returns the seconds that a call takes."""

_CPU = torch.device("cpu")
_CANDIDATES = ("fp16", "dense")
_ROWS = (1, 16)
_MAX_VALUES = 1 << 22  # of a weight that is timed; a larger one has only its first features


def with_formats(config: EngineConfig, files: ModelFiles, device: torch.device) -> EngineConfig:
    """Return the settings with all formats chosen; blocks. Raises ModelError if the model cannot be loaded.

    A dtype in the settings means the checkpoint's own format, and a checkpoint that is quantized keeps it.
    The result stays as it is if it comes here again.
    """
    if device.type != "cpu" or config.dtype != "auto":
        return config
    try:
        return of_spec(config, loader.read_spec(files), device, is_quantized=loader.is_quantized(files))
    except loader.ModelError as error:
        raise ModelError(str(error)) from error


def of_spec(
    config: EngineConfig, spec: DecoderSpec, device: torch.device, *, is_quantized: bool = False
) -> EngineConfig:
    """Return the settings with all formats chosen for a model that is known by its architecture."""
    if device.type != "cpu" or config.dtype != "auto":
        return config
    if config.quantization == "auto" and not is_quantized:
        set_up_thread(config, device)
        chosen, why = choose(spec, seconds_of)
        config = config.model_copy(update={"quantization": chosen})
        logger.info("quantization: %s, %s", chosen, why)
    is_compiled = config.quantization == "int8" and _obstacle_to_int8() is None
    if config.quantization != "fp16" and not is_compiled:
        return config
    kv_dtype = config.kv_dtype
    if kv_dtype == "auto":
        kv_dtype = "int8" if is_compiled and not _has_key_bias(spec) else "bfloat16"
    return config.model_copy(update={"dtype": "float32", "kv_dtype": kv_dtype})


def _has_key_bias(spec: DecoderSpec) -> bool:
    """Return True if keys have a bias: a large one leaves few steps of int8 to the other values of a head."""
    return any(layer.attention.qkv_bias for layer in spec.layers)


def choose(spec: DecoderSpec, timer: Timer) -> tuple[str, str]:
    """Return a value of the setting `quantization` for unquantized weights on a CPU, and why it is chosen.

    Products of experts are not compiled: on two AVX512 cores those of 16 tokens with 4 of 32 experts of 512 x
    1024 take 2.3 ms in int8, 5.7 in float32 and 1.6 in bfloat16.
    """
    if any(isinstance(layer.mlp, MoeSpec) for layer in spec.layers):
        return "dense", "since products of experts are compiled for no other format"
    obstacle = _obstacle_to_int8()
    if obstacle is None:
        return "int8", "whose kernels are compiled for this CPU"
    why = f"since {obstacle}"
    shapes = layer_shapes(spec)
    timed = [one for name in _CANDIDATES if (one := time_candidate(name, shapes, timer)) is not None]
    independent = [one for one in timed if one.is_independent]
    if not independent:
        return "dense", f"{why} and rows of other formats depend on each other"
    best = min(independent, key=lambda one: one.seconds[0] * one.seconds[1])
    times = [f"{one.name} {1e3 * one.seconds[0]:.2f} / {1e3 * one.seconds[1]:.2f} ms" for one in timed]
    return best.name, f"{why}; products of a layer at 1 / 16 rows: {', '.join(times)}"


def _obstacle_to_int8() -> str | None:
    """Return why int8 weights have no compiled product on this CPU; None if they have."""
    if not compiler.is_available():
        return "numba is not installed, or NUMBA_DISABLE_JIT is set"
    return (
        None if num_lanes() else "this CPU, or the one that NUMBA_CPU_NAME names, has neither AVX2 nor AVX512"
    )


class Timed(NamedTuple):
    """The times of a format's products, by `_ROWS`, and if rows do not depend on those beside them."""

    name: str
    seconds: tuple[float, ...]
    is_independent: bool


def layer_shapes(spec: DecoderSpec) -> list[LinearShape]:
    """Return the shapes of the linears of a model's first layer, large ones cut to some of their features."""
    model = loader.empty_decoder(spec, torch.float32, torch.device("meta"))
    linears = [leaf for path, leaf in model.leaves() if path.startswith("layers.0.")]
    sizes = [leaf.shape for leaf in linears if isinstance(leaf, Linear)]
    return [
        LinearShape(size.in_features, {"": min(size.out_features, -(-_MAX_VALUES // size.in_features))})
        for size in sizes
    ]


def time_candidate(name: str, shapes: Iterable[LinearShape], timer: Timer) -> Timed | None:
    """Time the products of some shapes in a format; None if this CPU does not have it."""
    dtype = torch.float32 if name == "fp16" else loader.default_dtype(_CPU)
    try:
        make_linear = conversion_to(name)(dtype, _CPU, WHOLE)
    except loader.ModelError:
        return None
    seconds, is_independent = [0.0] * len(_ROWS), True
    generator = torch.Generator().manual_seed(0)
    for shape in shapes:
        weights = make_linear("layers.0.linear", shape)
        weights.fill("weight", weights.random("weight", generator))
        x = torch.randn(max(_ROWS), shape.in_features, generator=generator).to(dtype)
        for index, rows in enumerate(_ROWS):
            seconds[index] += timer(partial(weights.matmul, x[:rows]))
        is_independent &= torch.equal(weights.matmul(x)[:1], weights.matmul(x[:1]))
    return Timed(name, tuple(seconds), is_independent)


def seconds_of(call: Callable[[], object]) -> float:
    """Return the least seconds of a call, of those of about 10 milliseconds."""
    call()
    best, end = float("inf"), time.perf_counter() + 0.01
    while (start := time.perf_counter()) < end:
        call()
        best = min(best, time.perf_counter() - start)
    return best
