"""Times single decode and prefill steps of a model with random weights of a named shape.

Steps go through the runner as the engine's loop sends them (one ahead of the tokens read), without scheduler,
tokenizer and server. The floor of a step is the time of its matrix products, measured alone in the same run,
plus the least that attention needs: for decode the KV bytes at the bandwidth of a copy, for prefill the FLOPs
at the rate of a large product.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.bench.probe import Ceilings, Probe
from engine.config import EngineConfig
from engine.device.devices import choose_device, choose_dtype, set_up_thread
from engine.device.formats import of_spec
from engine.device.kv_cache import kv_storage
from engine.device.runner import ModelRunner
from engine.device.thread import LaunchedStep
from engine.outputs import Row, SlotInit, StepOutput, StepPlan
from engine.request import SamplingParams
from kernels.kv_layer import KVStorage
from models.decoder import Decoder
from models.errors import ModelError
from models.layers import Linear
from models.loader import random_decoder
from models.shapes import SHAPES
from models.spec import DecoderSpec

SHAPE_NAMES = tuple(SHAPES)

NUM_DECODE_STEPS = 128
NUM_WARM_STEPS = 8
NUM_PREFILLS = 5


@dataclass(frozen=True)
class StepTime:
    """One kind of step, medians in milliseconds.

    `milliseconds` is what a step adds to a run: from launch to launch for decode, from launch to the token
    for prefill. `device_milliseconds` is the device's own time of it.
    """

    step: str
    num_tokens: int
    context: int
    milliseconds: float
    device_milliseconds: float
    matmul_milliseconds: float
    floor_milliseconds: float


@dataclass(frozen=True)
class StepsToMeasure:
    """Decode steps of `batches` rows from `context` tokens on, and prefill steps of `prefills` tokens."""

    batches: Sequence[int] = (1, 16, 64, 256)
    context: int = 512
    prefills: Sequence[int] = (512, 2048)

    @property
    def max_batch(self) -> int:
        """Rows of the largest decode step."""
        return max(self.batches, default=1)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence, with the token that is sampled last."""
        return max(self.context + NUM_DECODE_STEPS, *self.prefills) + 1

    @property
    def token_budget(self) -> int:
        """Tokens of the largest step."""
        return max(self.context, self.max_batch, *self.prefills)

    def kv_tokens(self, page_size: int) -> int:
        """Return the size of a pool that holds all sequences."""
        decode_pages = self.max_batch * -(-(self.context + NUM_DECODE_STEPS + 1) // page_size)
        return page_size * max(decode_pages, -(-self.max_model_len // page_size))


def with_formats(shape: str, config: EngineConfig) -> EngineConfig:
    """Return the settings with all formats chosen as a server does for a model of a shape."""
    return of_spec(config, SHAPES[shape], choose_device(config))


def measure_steps(
    shape: str,
    config: EngineConfig,
    steps: StepsToMeasure,
    sampling: SamplingParams,
    on_row: Callable[[StepTime], None],
) -> tuple[Ceilings, list[StepTime]]:
    """Make a model of a shape (of SHAPE_NAMES) and time its steps; `on_row` gets each row when measured.

    Of `config` device, dtype, quantization, kv_dtype, page_size, kv_tokens and threads count; the rest
    follows from `steps`. Raises ValueError, naming the setting, for what the device does not have or hold.
    """
    limit = SHAPES[shape].max_position
    if steps.max_model_len > limit:
        raise ValueError(
            f"prefill: {steps.max_model_len} tokens are the longest sequence of this run (context and "
            f"{NUM_DECODE_STEPS} decode steps, or a prompt), and {shape} has a context window of {limit}"
        )
    needed = steps.kv_tokens(config.page_size)
    if config.kv_tokens is not None and config.kv_tokens < needed:
        raise ValueError(f"kv_tokens: {config.kv_tokens} are too few, the steps of this run need {needed}")
    config = config.model_copy(
        update={
            "max_num_seqs": steps.max_batch,
            "max_model_len": steps.max_model_len,
            "token_budget": steps.token_budget,
            "kv_tokens": config.kv_tokens or needed,
        }
    )
    device = choose_device(config)
    set_up_thread(config, device)
    try:
        floors = measure_floors(shape, config, steps)
        runner = random_runner(shape, config)
    except ModelError as error:
        raise ValueError(f"quantization: {error}") from error
    except RuntimeError as error:
        if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)):
            raise  # a CPU's allocator has no error of its own
        raise ValueError(f"shape: {shape} does not fit into the memory of {device}") from error
    return floors.ceilings, time_steps(runner, config.page_size, steps, floors, sampling, on_row)


def random_runner(shape: str, config: EngineConfig) -> ModelRunner:
    """Return a runner with random weights, for this thread, after `set_up_thread` was called on it.

    Raises ValueError, naming the setting, when the KV pool does not fit, and torch.OutOfMemoryError.
    """
    device = choose_device(config)
    with torch.inference_mode():
        model = random_model(shape, config, device)
    assert config.token_budget is not None
    return ModelRunner.around(model, config, config.token_budget, ())


def random_model(shape: str, config: EngineConfig, device: torch.device) -> Decoder:
    """Return a model of a shape with random weights. Raises ModelError for an unknown quantization."""
    dtype = choose_dtype(config, device)
    return random_decoder(SHAPES[shape], dtype, device, quantization=config.conversion)


@dataclass(frozen=True)
class Floors:
    """The ceilings, and the seconds a model's matrix products take by (rows, rows with logits)."""

    ceilings: Ceilings
    matmul_seconds: dict[tuple[int, int], float]
    spec: DecoderSpec
    storage: KVStorage

    def decode_seconds(self, batch: int, context: int) -> float:
        """Return a lower bound for a decode step of `batch` rows with `context` keys each."""
        num_bytes = self.storage.num_bytes
        per_token = sum(2 * len(group.layers) * num_bytes(group.token_size) for group in self.spec.kv_groups)
        kv_bytes = batch * context * per_token
        return self.matmul_seconds[batch, batch] + kv_bytes / self.ceilings.bytes_per_second

    def prefill_seconds(self, length: int) -> float:
        """Return a lower bound for a prefill step of one prompt, at the rate of the large product."""
        heads = self.spec.layers[0].attention
        flops = 2 * length * length * heads.num_heads * heads.head_dim * self.spec.num_layers
        return self.matmul_seconds[length, 1] + flops / self.ceilings.flops_per_second


def measure_floors(shape: str, config: EngineConfig, steps: StepsToMeasure) -> Floors:
    """Measure the ceilings and products, with weights that are freed before the model is made."""
    device = choose_device(config)
    spec, dtype = SHAPES[shape], choose_dtype(config, device)
    probe = Probe(device, dtype)
    with torch.inference_mode():
        ceilings = probe.ceilings()
        model = random_model(shape, config, device)
        seconds = matmul_seconds(model, probe, steps)
        storage = kv_storage(model, config.kv_dtype)
    del model, probe
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Floors(ceilings, seconds, spec, storage)


def matmul_seconds(model: Decoder, probe: Probe, steps: StepsToMeasure) -> dict[tuple[int, int], float]:
    """Times of the matrix products alone, by (rows, rows with logits); in a CUDA graph where there is one.

    After the last layer's attention only rows with logits go on.
    """
    linears = [leaf for _, leaf in model.leaves() if isinstance(leaf, Linear) and leaf is not model.output]
    sizes = {linear.shape.in_features for linear in linears}

    def time_chain(num_rows: int, num_logits: int) -> float:
        inputs = {size: probe.randn(num_rows, size) for size in sizes}

        def chain() -> None:
            for linear in linears[:-3]:
                linear.weights.matmul(inputs[linear.shape.in_features])
            for linear in (*linears[-3:], model.output):
                linear.weights.matmul(inputs[linear.shape.in_features][:num_logits])

        return probe.wall_seconds(captured(chain) if probe.cuda else chain, 10)

    kinds = {*((length, 1) for length in steps.prefills), *((batch, batch) for batch in steps.batches)}
    return {kind: time_chain(*kind) for kind in sorted(kinds)}


def captured(call: Callable[[], None]) -> Callable[[], None]:
    """Return a call captured as one CUDA graph, on this thread's stream."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call()
    replay: Callable[[], None] = graph.replay
    return replay


def time_steps(
    runner: ModelRunner,
    page_size: int,
    steps: StepsToMeasure,
    floors: Floors,
    sampling: SamplingParams,
    on_row: Callable[[StepTime], None],
) -> list[StepTime]:
    """Run and time the steps, on the thread that made the runner."""
    driver = StepDriver(runner, page_size, sampling)
    rows = []

    def add(step: str, num_tokens: int, context: int, seconds: tuple[float, float, float, float]) -> None:
        rows.append(StepTime(step, num_tokens, context, *(1e3 * value for value in seconds)))
        on_row(rows[-1])

    for length in steps.prefills:
        times = driver.time_prefill(length)
        matmul, floor = floors.matmul_seconds[length, 1], floors.prefill_seconds(length)
        add("prefill", length, length, (*times, matmul, floor))
    for batch in steps.batches:
        times = driver.time_decode(batch, steps.context)
        matmul = floors.matmul_seconds[batch, batch]
        floor = floors.decode_seconds(batch, steps.context + NUM_DECODE_STEPS // 2)
        add("decode", batch, steps.context, (*times, matmul, floor))
    return rows


class StepDriver:
    """Sends plans to a runner, at most one ahead of the tokens that are read."""

    def __init__(self, runner: ModelRunner, page_size: int, sampling: SamplingParams) -> None:
        self._runner = runner
        self._page_size = page_size
        self._sampling = sampling
        self._launched: deque[LaunchedStep] = deque()
        self._num_steps = 0
        self.outputs: list[StepOutput] = []

    def launch(self, rows: Sequence[Row]) -> None:
        """Launch a step and read the tokens of the one before it."""
        self._launched.append(self._runner.launch(StepPlan.of(self._num_steps, rows)))
        self._num_steps += 1
        self.finish(1)

    def finish(self, num_left: int = 0) -> None:
        """Read the tokens of all steps but the newest `num_left`."""
        while len(self._launched) > num_left:
            self.outputs.append(self._launched.popleft().wait())

    def prefill(self, slot: int, pages: Sequence[int], length: int) -> None:
        """Prefill one prompt of `length` tokens in one step."""
        tokens = tuple((slot * 7919 + index * 31) % 200 for index in range(length))
        init = SlotInit(self._sampling, seed=slot, prompt_token_ids=tokens, output_token_ids=())
        self.launch([Row(slot, slot, 0, tokens, new_pages=(tuple(pages),), init=init)])

    def decode(self, position: int, pages: Sequence[Sequence[int]]) -> None:
        """Decode one token, at `position`, for each sequence; `pages` are the pages of each."""
        column, offset = divmod(position, self._page_size)
        self.launch(
            [
                Row(slot, slot, position, new_pages=() if offset else ((table[column],),))
                for slot, table in enumerate(pages)
            ]
        )

    def time_prefill(self, length: int) -> tuple[float, float]:
        """Return the median seconds of a prefill step: from launch to the token, and on the device."""
        pages = range(-(-length // self._page_size))
        times = []
        for _ in range(NUM_PREFILLS + 2):
            start = time.perf_counter()
            self.prefill(0, pages, length)
            self.finish()
            times.append(time.perf_counter() - start)
        return statistics.median(times[2:]), self._median_device_seconds(NUM_PREFILLS)

    def time_decode(self, batch: int, context: int) -> tuple[float, float]:
        """Return the median seconds of a decode step: from launch to launch, and on the device."""
        per_sequence = -(-(context + NUM_DECODE_STEPS + 1) // self._page_size)
        pages = [range(slot * per_sequence, (slot + 1) * per_sequence) for slot in range(batch)]
        for slot in range(batch):
            self.prefill(slot, pages[slot][: -(-context // self._page_size)], context)
        self.finish()
        times = []
        start = time.perf_counter()
        for index in range(NUM_DECODE_STEPS):
            self.decode(context + index, pages)
            now = time.perf_counter()
            times.append(now - start)
            start = now
        self.finish()
        return statistics.median(times[NUM_WARM_STEPS:]), self._median_device_seconds(
            NUM_DECODE_STEPS - NUM_WARM_STEPS
        )

    def _median_device_seconds(self, count: int) -> float:
        return statistics.median(out.end_seconds - out.start_seconds for out in self.outputs[-count:])
