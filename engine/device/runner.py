"""Computes steps: StepPlan -> batch -> logits -> StepOutput.

Owns model, KV cache, slots, sampler and graphs. How much of a step is launched as CUDA graphs:

    step                                 inputs                  layers   logits   sampling
    decode rows only                     one copy, decode_inputs graph    graph    graph
    rows of several tokens               build_batch, step_inputs graph   graph    graph
    the same, with readouts              build_batch, step_inputs graph   eager    eager
    on a CPU, or larger than any graph   build_batch, step_inputs eager   eager    eager

A model with a score head has no logits to sample from: its steps are eager.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from engine.config import EngineConfig
from engine.device.batch import StepBatch, build_batch
from engine.device.clock import CudaClock
from engine.device.compiling import with_kept_kernels
from engine.device.decode_graphs import DecodeGraphs
from engine.device.devices import choose_device, choose_dtype, does_not_fit, raise_if_lost, set_up_thread
from engine.device.kv_cache import KVCache
from engine.device.mixed_graphs import MixedGraph, MixedGraphs
from engine.device.readouts import Readouts
from engine.device.sampler import EagerSampling, Sampler, SamplingProgram
from engine.device.samples import SamplesOnHost, build_step_output
from engine.device.slots import StateSlots
from engine.device.staging import upload
from engine.device.token_masks import Masks, Outcome, TokenMasks
from engine.device.warm_up import compile_kernels
from engine.errors import ModelError, StepFailed
from engine.kv_layout import KVLayout
from engine.outputs import StepOutput, StepPlan
from models import loader
from models.catalog import ModelFiles
from models.decoder import Decoder
from models.spec import DecoderSpec


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
    """A step queued on a CUDA stream, its samples on their way to pinned memory."""

    plan: StepPlan
    samples: SamplesOnHost
    clock: CudaClock
    start: torch.cuda.Event
    end: torch.cuda.Event
    is_done: bool = False

    def wait(self) -> StepOutput:
        """Block until the device is there and return the step's tokens. Raises DeviceLost."""
        try:
            self.end.synchronize()
        except Exception as error:
            raise_if_lost(error)
            raise
        return build_step_output(
            self.plan, self.samples, self.clock.seconds(self.start), self.clock.seconds(self.end)
        )


class ModelRunner:
    """Computes steps, one after the other, on the thread that made it."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        *,
        num_slots: int,
        token_budget: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._device = model.device
        self._slots = StateSlots(
            num_slots,
            max_pages=-(-max_model_len // kv_cache.page_size),
            padding_page=kv_cache.num_pages,
            page_scales=kv_cache.page_scales,
            states=model.spec.states,
            short_context=model.spec.short_context,
            vocab_size=model.spec.vocab_size,
            eos_token_ids=eos_token_ids,
            device=self._device,
        )
        self._masks = TokenMasks(self._slots, model.spec.vocab_size)
        self._readouts = Readouts(model, num_slots)
        self._sampler = Sampler(self._slots)
        self._clock: CudaClock | None = None
        self._graphs: DecodeGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None
        if self._device.type == "cuda":
            self._clock = CudaClock()
        if self._device.type == "cuda" and not model.spec.num_labels:
            self._graphs = DecodeGraphs(model, kv_cache.layers, self._slots, self._sampler, num_slots)
            self._mixed_graphs = MixedGraphs(
                model,
                kv_cache.layers,
                token_budget=token_budget,
                max_num_seqs=num_slots,
                slots=self._slots,
                staging=self._graphs.staging,
                logits=self._graphs.logits,
            )
        self.is_asynchronous = self._clock is not None
        self._last_step: QueuedStep | None = None
        self.vocab_size = model.spec.vocab_size
        self.hidden_size = model.spec.hidden_size
        self.num_labels = model.spec.num_labels
        self.num_pages = kv_cache.num_pages
        self.num_kv_tokens = kv_cache.num_tokens
        self.kv_token_bytes = kv_cache.token_bytes
        self.kv_windows = kv_cache.windows
        self.has_states = bool(model.spec.states)
        self.short_context = model.spec.short_context
        self.max_model_len = max_model_len
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.device = str(self._device)

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        files: ModelFiles,
        token_budget: int,
        *,
        compiles_apart: bool = True,
    ) -> "ModelRunner":
        """Load the weights, allocate the KV cache, compile kernels, capture the graphs.

        `compiles_apart`: kernels of a CPU are compiled in another process. Raises ModelError when the model
        cannot be loaded and ValueError, naming the setting, when a setting cannot be met.
        """
        device = choose_device(config)
        set_up_thread(config, device)
        with torch.inference_mode():
            make = partial(cls._load, config, files, device, token_budget)
            if device.type == "cpu" and compiles_apart:
                return with_kept_kernels(make, config, token_budget)
            return make()

    @classmethod
    def _load(
        cls, config: EngineConfig, files: ModelFiles, device: torch.device, token_budget: int
    ) -> "ModelRunner":
        dtype = choose_dtype(config, device)
        try:
            model = loader.load(
                files,
                dtype,
                device,
                quantization=config.conversion,
                kv_scales=config.kv_dtype == "fp8",
                progress=True,
            )
        except loader.ModelError as error:
            raise ModelError(str(error)) from error
        except torch.OutOfMemoryError as error:
            raise ValueError(f"model: {files.name} in {dtype} {does_not_fit(device)}") from error
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
                token_budget=token_budget,
                max_model_len=choose_max_model_len(model.spec, config, token_budget, kv_cache.num_pages),
                eos_token_ids=eos_token_ids,
            )
            try:
                for graphs in (runner._graphs, runner._mixed_graphs):
                    if graphs is not None:
                        graphs.capture()
            except torch.OutOfMemoryError as error:
                raise ValueError(
                    f"kv_tokens: beside a pool of {kv_cache.num_tokens:,} tokens, what CUDA graphs of up to "
                    f"{config.max_num_seqs} rows and {token_budget} tokens need "
                    f"{does_not_fit(model.device)}; lower kv_tokens, max_num_seqs or token_budget"
                ) from error
            max_tokens = min(token_budget, runner.max_model_len - 1)
            compile_kernels(runner.launch, model, kv_cache, max_tokens)
            return runner

    def launch(self, plan: StepPlan, on_wait: Callable[[], None] = lambda: None) -> ComputedStep | QueuedStep:
        """Queue a step on the device; on a CPU, compute it.

        `on_wait` is called when sampling has to wait for the tokens of the steps before.
        Raises StepFailed, with the numbers, when memory runs out, DeviceLost when no step can follow, and
        whatever else goes wrong.
        """
        with torch.inference_mode():
            if self._clock is None:
                start = time.perf_counter()
                samples = self._compute(plan, on_wait)
                return ComputedStep(build_step_output(plan, samples, start, time.perf_counter()))
            try:
                return self._queue(plan, self._clock, on_wait)
            except torch.OutOfMemoryError as error:
                raise StepFailed(
                    f"A step of {plan.num_tokens} tokens {does_not_fit(self._device)}."
                ) from error
            except Exception as error:
                raise_if_lost(error)
                raise

    def _queue(self, plan: StepPlan, clock: CudaClock, on_wait: Callable[[], None]) -> QueuedStep:
        if self._last_step is None or self._last_step.end.query():
            clock.synchronize()
        start = clock.record()
        samples = self._compute(plan, on_wait)
        self._last_step = QueuedStep(plan, samples, clock, start, clock.record())
        return self._last_step

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages (source, target)."""
        pairs = np.array(copies, np.int64).T.copy()
        ((sources, targets),) = upload(self._device, (pairs,))
        self._kv_cache.copy_pages(sources, targets)

    def _compute(self, plan: StepPlan, on_wait: Callable[[], None]) -> SamplesOnHost:
        if self._graphs is not None and self._graphs.fits(plan):
            masks = self._masks.begin(plan.slots)
            self._graphs.replay(plan)
            sampling = self._graphs.sampling(plan.num_rows)
            return self._sample(sampling, plan.slots, plan.starts, masks, on_wait)
        if plan.page_copies:
            self._copy_pages(plan.page_copies)
        graph = None
        if self._mixed_graphs is not None:
            graph = self._mixed_graphs.graph_for(plan.num_tokens, sum(plan.num_logits))
        inputs = None if graph is None else graph.inputs
        batch = build_batch(plan, self._slots, self._kv_cache.page_size, self._device, inputs)
        self._masks.start(plan)
        masks = self._masks.begin(batch.logits_slots)
        if graph is not None and not plan.readouts:
            return self._sample_captured(graph, batch, masks, on_wait)
        hidden = _with_retry(lambda: self._forward(batch, graph))
        readouts = None
        if plan.readouts:
            hidden, read = hidden[: batch.num_logits], hidden[batch.num_logits :]
            readouts = _with_retry(lambda: self._readouts.compute(batch.readouts, read))
        if batch.num_logits:
            program = EagerSampling(self._sampler, self._model.logits(hidden), *batch.sampled)
            samples = self._sample(program, batch.logits_slots, batch.last_positions, masks, on_wait)
        else:
            samples = SamplesOnHost.empty()
        return samples if readouts is None else replace(samples, readouts=readouts)

    def _forward(self, batch: StepBatch, graph: MixedGraph | None) -> torch.Tensor:
        if graph is None:
            return self._model(batch.forward, self._kv_cache.layers)
        graph.layers.replay()
        return self._model.tail(graph.attention_out, graph.residual, batch.forward)

    def _sample_captured(
        self, graph: MixedGraph, batch: StepBatch, masks: Masks | None, on_wait: Callable[[], None]
    ) -> SamplesOnHost:
        """Compute a step whose rows return only tokens, up to its samples, as graphs."""
        assert self._graphs is not None and self._mixed_graphs is not None
        graph.layers.replay()
        if not batch.num_logits:
            return SamplesOnHost.empty()
        self._mixed_graphs.replay_tail(batch.num_logits)
        sampling = self._graphs.sampling(batch.num_logits)
        return self._sample(sampling, batch.logits_slots, batch.last_positions, masks, on_wait)

    def _sample(
        self,
        sampling: SamplingProgram,
        slots: list[int],
        last_positions: list[int],
        masks: Masks | None,
        on_wait: Callable[[], None],
    ) -> SamplesOnHost:
        """Sample at every logits position, given by its slot and the position of its token."""
        self._slots.allow_ends(slots, last_positions)
        outcome = self._write_masks(masks, on_wait)
        num_logprobs: list[int | None] = []
        if self._slots.has_logprobs(slots):
            num_logprobs = [self._slots.num_logprobs(slot) for slot in slots]
        if num_logprobs or self._slots.needs_logit_edits(slots):
            samples = sampling.full(with_logprobs=bool(num_logprobs))
        else:
            samples = sampling.plain()
        on_host = SamplesOnHost.copy_from(samples, len(slots), num_logprobs, outcome)
        if masks is not None:  # the tokens of its rows decide on their next masks
            event = None if self._clock is None else self._clock.record()
            self._masks.note(masks, on_host.tokens, event)
        return on_host

    def _write_masks(self, masks: Masks | None, on_wait: Callable[[], None]) -> Outcome:
        if masks is None:
            return Outcome()
        if not masks.computed.done():
            on_wait()
        return self._masks.write(masks)


T = TypeVar("T")


def _with_retry(compute: Callable[[], T]) -> T:
    """Return what `compute` returns, called once more if memory runs out.

    The second time torch's cache of blocks of other sizes has been freed. Nothing has been sampled yet.
    """
    try:
        return compute()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return compute()


def choose_max_model_len(spec: DecoderSpec, config: EngineConfig, token_budget: int, num_pages: int) -> int:
    """Return the most tokens of a sequence: what the settings say, or what model and pool allow.

    Raises ValueError if the settings ask for more than these allow.
    """
    windows = tuple(group.window for group in spec.kv_groups)
    layout = KVLayout(windows, config.page_size, token_budget=token_budget, run_ahead=config.run_ahead)
    pool_tokens = layout.max_tokens(num_pages, spec.max_position)
    if config.max_model_len is None:
        return min(spec.max_position, pool_tokens)
    if config.max_model_len > spec.max_position:
        raise ValueError(
            f"max_model_len: {config.max_model_len} is more than the model's context window of "
            f"{spec.max_position} tokens"
        )
    if config.max_model_len > pool_tokens:
        raise ValueError(
            f"max_model_len: {config.max_model_len} tokens do not fit into a KV pool of {pool_tokens}; "
            f"lower it to {pool_tokens}, or raise kv_tokens"
        )
    return config.max_model_len
