"""StepPlan -> batch -> logits -> StepOutput. Owns model, KV cache, slots, sampler and graphs."""

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.device.batch import build_batch
from engine.device.clock import CudaClock
from engine.device.graphs import POSITIONS, SLOTS, DecodeGraphs
from engine.device.kv_cache import KVCache
from engine.device.sampler import Sampler
from engine.device.slots import StateSlots
from engine.errors import ModelError
from engine.outputs import StepOutput, StepPlan
from models import loader
from models.catalog import ModelFiles
from models.decoder import Decoder

NUM_TOKEN_BUFFERS = 4


def _output(plan: StepPlan, tokens: torch.Tensor, start_seconds: float, end_seconds: float) -> StepOutput:
    """`tokens` int64: those of the sampled rows, in their order (and maybe padding)."""
    values = iter(tokens.tolist())
    sampled = tuple((next(values),) if row.sample else () for row in plan.rows)
    return StepOutput(plan.step_id, sampled, start_seconds, end_seconds)


@dataclass(frozen=True)
class ComputedStep:
    """A step on a CPU: done when it is launched."""

    output: StepOutput
    is_done: bool = True

    def wait(self) -> StepOutput:
        """Return the step's tokens."""
        return self.output


@dataclass(frozen=True)
class QueuedStep:
    """A step queued on a CUDA stream, its tokens on their way to pinned memory."""

    plan: StepPlan
    tokens: torch.Tensor
    clock: CudaClock
    start: torch.cuda.Event
    end: torch.cuda.Event
    is_done: bool = False

    def wait(self) -> StepOutput:
        """Block until the device is there and return the step's tokens."""
        self.end.synchronize()
        return _output(self.plan, self.tokens, self.clock.seconds(self.start), self.clock.seconds(self.end))


class ModelRunner:
    """Computes steps, one after the other, on the thread that made it."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        *,
        num_slots: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._device = kv_cache.layers[0][0].device
        self._slots = StateSlots(
            num_slots,
            max_pages=-(-max_model_len // kv_cache.page_size),
            dummy_page=kv_cache.num_pages,
            vocab_size=model.spec.vocab_size,
            device=self._device,
        )
        self._sampler = Sampler(self._slots, eos_token_ids)
        self._clock: CudaClock | None = None
        self._graphs: DecodeGraphs | None = None
        if self._device.type == "cuda":
            self._clock = CudaClock()
            self._graphs = DecodeGraphs(model, kv_cache.layers, self._slots, self._sampler.choose, num_slots)
            self._token_buffers = itertools.cycle(
                [torch.zeros(num_slots, dtype=torch.int64, pin_memory=True) for _ in range(NUM_TOKEN_BUFFERS)]
            )
        self._last_step: QueuedStep | None = None
        self.vocab_size = model.spec.vocab_size
        self.num_pages = kv_cache.num_pages
        self.max_model_len = max_model_len
        self.dtype = str(kv_cache.layers[0][0].dtype).removeprefix("torch.")
        self.device = str(self._device)

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        files: ModelFiles,
        token_budget: int,
        on_bytes: Callable[[int, int], None] | None = None,
    ) -> "ModelRunner":
        """Load the weights, allocate the KV cache, capture the graphs.

        Raises ModelError when the model cannot be loaded and ValueError, naming the setting, when a setting
        cannot be met.
        """
        device = choose_device(config)
        dtype = loader.default_dtype(device) if config.dtype == "auto" else getattr(torch, config.dtype)
        set_up_thread(config, device)
        with torch.inference_mode():
            try:
                model = loader.load(files, dtype, device, on_bytes)
            except loader.ModelError as error:
                raise ModelError(str(error)) from error
            return cls.around(model, config, token_budget, files.eos_token_ids)

    @classmethod
    def around(
        cls, model: Decoder, config: EngineConfig, token_budget: int, eos_token_ids: tuple[int, ...]
    ) -> "ModelRunner":
        """A runner for a model that is loaded. Raises ValueError, naming the setting that cannot be met."""
        with torch.inference_mode():
            kv_cache = KVCache.allocate(model, config, token_budget)
            runner = cls(
                model,
                kv_cache,
                num_slots=config.max_num_seqs,
                max_model_len=_max_model_len(config, model.spec.max_position, kv_cache.num_tokens),
                eos_token_ids=eos_token_ids,
            )
            if runner._graphs is not None:
                runner._graphs.capture()
            return runner

    def launch(self, plan: StepPlan) -> ComputedStep | QueuedStep:
        """Queue a step on the device; on a CPU, compute it. Raises whatever goes wrong in that."""
        with torch.inference_mode():
            if self._clock is None:
                start = time.perf_counter()
                tokens = self._run_eagerly(plan)
                return ComputedStep(_output(plan, tokens, start, time.perf_counter()))
            return self._queue(plan, self._clock)

    def _queue(self, plan: StepPlan, clock: CudaClock) -> QueuedStep:
        if self._last_step is None or self._last_step.end.query():
            clock.synchronize()
        assert self._graphs is not None
        if self._graphs.fits(plan):
            start, tokens = self._replay(plan, self._graphs, clock)
        else:
            start = clock.record()
            tokens = self._run_eagerly(plan)
        host_tokens = next(self._token_buffers)[: tokens.shape[0]]
        host_tokens.copy_(tokens, non_blocking=True)
        self._last_step = QueuedStep(plan, host_tokens, clock, start, clock.record())
        return self._last_step

    def _run_eagerly(self, plan: StepPlan) -> torch.Tensor:
        batch = build_batch(plan, self._slots, self._kv_cache.page_size, self._device)
        hidden = self._model(batch.forward, self._kv_cache.layers)
        if not batch.slots_host:
            return batch.slots
        logits = self._model.logits(hidden[batch.logits_positions])
        self._sampler.edit(logits, batch.slots, batch.slots_host, batch.num_outputs)
        tokens = self._sampler.choose(logits, batch.slots, batch.positions)
        self._sampler.count(tokens, batch.slots, batch.slots_host)
        return tokens

    def _replay(
        self, plan: StepPlan, graphs: DecodeGraphs, clock: CudaClock
    ) -> tuple[torch.cuda.Event, torch.Tensor]:
        start = clock.record()
        graph = graphs.stage(plan.rows)
        graph.forward.replay()
        slots = [row.slot for row in plan.rows]
        num_outputs = [row.start + 1 - len(self._slots.inits[row.slot].prompt_token_ids) for row in plan.rows]
        if not self._sampler.has_edits(slots, num_outputs):
            graph.sample.replay()
            return start, graph.tokens
        num_rows = len(slots)
        rows = graphs.staging[SLOTS, :num_rows]
        logits = graph.logits[:num_rows]
        self._sampler.edit(logits, rows, slots, num_outputs)
        tokens = self._sampler.choose(logits, rows, graphs.staging[POSITIONS, :num_rows] + 1)
        self._sampler.count(tokens, rows, slots)
        return start, tokens


def set_up_thread(config: EngineConfig, device: torch.device) -> None:
    """Give the calling thread its CPU threads, or its own CUDA stream: both belong to a thread."""
    torch.set_num_threads(config.threads or _num_cores())
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))


def choose_device(config: EngineConfig) -> torch.device:
    """The device the settings ask for. Raises ValueError when it is not there."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ValueError("device: cuda was asked for, but torch finds no usable CUDA device")
    return torch.device("cuda", 0) if has_cuda and config.device != "cpu" else torch.device("cpu")


def _num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _max_model_len(config: EngineConfig, model_limit: int, pool_tokens: int) -> int:
    if config.max_model_len is None:
        return min(model_limit, pool_tokens)
    if config.max_model_len > model_limit:
        raise ValueError(
            f"max_model_len: {config.max_model_len} is more than the model's context window of "
            f"{model_limit} tokens"
        )
    if config.max_model_len > pool_tokens:
        raise ValueError(
            f"max_model_len: {config.max_model_len} tokens do not fit into a KV pool of {pool_tokens}; "
            "lower it, or raise kv_tokens"
        )
    return config.max_model_len
