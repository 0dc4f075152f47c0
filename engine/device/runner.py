"""StepPlan -> batch -> logits -> StepOutput. Owns model, KV cache, slots, sampler and graphs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.config import EngineConfig
from engine.device.batch import StepBatch, build_batch
from engine.device.clock import CudaClock
from engine.device.constraints import Constraints, Masks, Outcome
from engine.device.devices import choose_device, does_not_fit, raise_if_lost, set_up_thread
from engine.device.graphs import DecodeGraph, DecodeGraphs
from engine.device.kv_cache import KVCache
from engine.device.mixed_graphs import MixedGraph, MixedGraphs
from engine.device.pooling import Pools
from engine.device.sampler import Sampled, Sampler
from engine.device.samples import HostSamples, step_output
from engine.device.scores import Scores, score
from engine.device.slots import StateSlots
from engine.device.staging import upload
from engine.errors import ModelError, StepFailed
from engine.outputs import DecodeRows, StepOutput, StepPlan
from models import loader
from models.catalog import ModelFiles
from models.decoder import Decoder


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
    samples: HostSamples
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
        return step_output(
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
            dummy_page=kv_cache.num_pages,
            vocab_size=model.spec.vocab_size,
            eos_token_ids=eos_token_ids,
            device=self._device,
        )
        self._constraints = Constraints(self._slots, model.spec.vocab_size)
        self._pools = Pools(num_slots, model.spec.hidden_size, self._device)
        self._sampler = Sampler(self._slots)
        self._clock: CudaClock | None = None
        self._graphs: DecodeGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None
        if self._device.type == "cuda":
            self._clock = CudaClock()
            self._graphs = DecodeGraphs(model, kv_cache.layers, self._slots, self._sampler, num_slots)
            self._mixed_graphs = MixedGraphs(
                model,
                kv_cache.layers,
                token_budget=token_budget,
                max_num_seqs=num_slots,
                max_pages=self._slots.page_table.shape[1],
                dummy_slot=kv_cache.num_pages * kv_cache.page_size,
                staging=self._graphs.staging,
                logits=self._graphs.logits,
            )
        self.is_asynchronous = self._clock is not None
        self._last_step: QueuedStep | None = None
        self.vocab_size = model.spec.vocab_size
        self.hidden_size = model.spec.hidden_size
        self.num_pages = kv_cache.num_pages
        self.max_model_len = max_model_len
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.device = str(self._device)

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        files: ModelFiles,
        token_budget: int,
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
                model = loader.load(files, dtype, device, quantization=config.quantization)
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
                max_model_len=_max_model_len(config, model.spec.max_position, kv_cache.num_tokens),
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
                samples = self._run(plan, on_wait)
                return ComputedStep(step_output(plan, samples, start, time.perf_counter()))
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
        assert self._graphs is not None
        start = clock.record()
        if self._graphs.fits(plan):
            samples = self._replay(plan.decode, self._graphs, on_wait)
        else:
            samples = self._run(plan, on_wait)
        self._last_step = QueuedStep(plan, samples, clock, start, clock.record())
        return self._last_step

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages (source, target) of every layer."""
        pairs = np.array(copies, np.int64).T.copy()
        ((sources, targets),) = upload(self._device, (pairs,))
        for layer in self._kv_cache.layers:
            for pages in layer:
                pages[targets] = pages[sources]

    def _run(self, plan: StepPlan, on_wait: Callable[[], None]) -> HostSamples:
        if plan.page_copies:
            self._copy_pages(plan.page_copies)
        graph = None if self._mixed_graphs is None else self._mixed_graphs.graph_for(plan.num_tokens)
        inputs = None if graph is None else graph.inputs
        batch = build_batch(plan, self._slots, self._kv_cache.page_size, self._device, inputs)
        self._constraints.start(plan.chunks)
        masks = self._constraints.begin(batch.slots_host)
        if graph is not None and len(batch.hidden_indices) == len(batch.slots_host):
            return self._replay_mixed(graph, batch, masks, on_wait)
        try:
            hidden, scores = self._forward_and_score(batch, graph)
        except torch.OutOfMemoryError:
            # Once more, without what is cached in pieces of other sizes: nothing has been sampled yet.
            torch.cuda.empty_cache()
            hidden, scores = self._forward_and_score(batch, graph)
        num_sampled = len(batch.slots_host)
        pooled_from = num_sampled + len(batch.scored)
        samples = self._sample(batch, hidden[:num_sampled], scores, masks, on_wait)
        if len(hidden) == pooled_from:
            return samples
        pooled = self._pools.add(plan.chunks, hidden[pooled_from:])
        return samples if pooled is None else samples.with_pooled(*pooled)

    def _forward_and_score(
        self, batch: StepBatch, graph: MixedGraph | None
    ) -> tuple[torch.Tensor, Sequence[Scores]]:
        hidden = self._forward(batch, graph)
        num_sampled = len(batch.slots_host)
        before_scored = hidden[num_sampled : num_sampled + len(batch.scored)]
        return hidden, score(self._model.logits, before_scored, batch.scored, self.vocab_size)

    def _sample(
        self,
        batch: StepBatch,
        hidden: torch.Tensor,
        scores: Sequence[Scores],
        masks: Masks | None,
        on_wait: Callable[[], None],
    ) -> HostSamples:
        """Choose the tokens that follow those whose hidden states [num_sampled, hidden_size] these are."""
        num_sampled = len(batch.slots_host)
        if not num_sampled:
            return HostSamples.of(Sampled(batch.hidden_indices), 0, (), scores)
        logits = self._model.logits(hidden)
        state = self._slots
        state.allow_ends(batch.slots_host, batch.newest_host)
        outcome = self._constrain(masks, on_wait)
        num_logprobs = self._num_logprobs(batch.slots_host)
        if num_logprobs or state.needs_edits(batch.slots_host):
            samples = self._sampler.full(logits, *batch.sampled, with_logprobs=bool(num_logprobs))
        else:
            samples = self._sampler.plain(logits, *batch.sampled)
        on_host = HostSamples.of(samples, num_sampled, num_logprobs, scores)
        return self._note(on_host, masks, outcome)

    def _forward(self, batch: StepBatch, graph: MixedGraph | None) -> torch.Tensor:
        if graph is None:
            return self._model(batch.forward, self._kv_cache.layers)
        graph.layers.replay()
        return self._model.tail(graph.attention_out, graph.residual, batch.forward)

    def _replay(self, rows: DecodeRows, graphs: DecodeGraphs, on_wait: Callable[[], None]) -> HostSamples:
        masks = self._constraints.begin(rows.slots)
        graph = graphs.stage(rows)
        graph.forward.replay()
        return self._replay_sampling(graph, rows.slots, rows.starts, masks, on_wait)

    def _replay_mixed(
        self, graph: MixedGraph, batch: StepBatch, masks: Masks | None, on_wait: Callable[[], None]
    ) -> HostSamples:
        """Compute a step that returns only samples."""
        assert self._graphs is not None and self._mixed_graphs is not None
        graph.layers.replay()
        num_sampled = len(batch.slots_host)
        if not num_sampled:
            return HostSamples.of(Sampled(batch.hidden_indices), 0, ())
        self._mixed_graphs.end(num_sampled)
        sampling = self._graphs.graph_for(num_sampled)
        return self._replay_sampling(sampling, batch.slots_host, batch.newest_host, masks, on_wait)

    def _replay_sampling(
        self,
        graph: DecodeGraph,
        slots: list[int],
        newest: list[int],
        masks: Masks | None,
        on_wait: Callable[[], None],
    ) -> HostSamples:
        """Choose the tokens behind those at the positions `newest`, whose logits and slots are in place."""
        self._slots.allow_ends(slots, newest)
        outcome = self._constrain(masks, on_wait)
        num_logprobs = self._num_logprobs(slots)
        if num_logprobs or self._slots.needs_edits(slots):
            graph.full.replay()
            samples = HostSamples.of(graph.full_samples, len(slots), num_logprobs)
        else:
            graph.plain.replay()
            samples = HostSamples.of(graph.plain_samples, len(slots), ())
        return self._note(samples, masks, outcome)

    def _constrain(self, masks: Masks | None, on_wait: Callable[[], None]) -> Outcome:
        """Before sampling: put masks in place."""
        if masks is None:
            return Outcome()
        if not masks.computed.done():
            on_wait()
        return self._constraints.write(masks)

    def _note(self, samples: HostSamples, masks: Masks | None, outcome: Outcome) -> HostSamples:
        """After sampling: the tokens of rows that had masks decide on their next ones."""
        if masks is None:
            return samples
        event = None if self._clock is None else self._clock.record()
        self._constraints.note(masks, samples.tokens, event)
        return replace(samples, outcome=outcome, num_constrained=len(masks.slots))

    def _num_logprobs(self, slots: list[int]) -> list[int | None]:
        """For each slot how many most likely tokens it wants told; empty if none wants any."""
        state = self._slots
        return [state.num_logprobs(slot) for slot in slots] if state.wants_logprobs(slots) else []


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
