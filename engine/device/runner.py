"""StepPlan -> batch -> logits -> StepOutput. Owns model, KV cache, slots and sampler."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.device.batch import build_batch
from engine.device.kv_cache import KVCache
from engine.device.sampler import Sampler
from engine.device.slots import StateSlots
from engine.errors import ModelError
from engine.outputs import StepOutput, StepPlan
from models import loader
from models.catalog import ModelFiles
from models.decoder import Decoder


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose work is queued on the device, or done where launching means computing."""

    plan: StepPlan
    tokens: torch.Tensor
    start_seconds: float
    end_seconds: float

    @property
    def is_done(self) -> bool:
        """Whether wait() returns at once."""
        return True

    def wait(self) -> StepOutput:
        """Block until the step is done and return its tokens."""
        tokens = iter(self.tokens.tolist())
        return StepOutput(
            self.plan.step_id,
            tuple((next(tokens),) if row.sample else () for row in self.plan.rows),
            self.start_seconds,
            self.end_seconds,
        )


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
            vocab_size=model.spec.vocab_size,
            device=self._device,
        )
        self._sampler = Sampler(self._slots, eos_token_ids)
        self.vocab_size = model.spec.vocab_size
        self.num_pages = kv_cache.num_pages
        self.max_model_len = max_model_len
        self.dtype = str(kv_cache.layers[0][0].dtype).removeprefix("torch.")
        self.device = str(self._device)

    @classmethod
    def load(
        cls, config: EngineConfig, files: ModelFiles, on_bytes: Callable[[int, int], None] | None = None
    ) -> "ModelRunner":
        """Load the weights and allocate the KV cache.

        Raises ModelError when the model cannot be loaded and ValueError, naming the setting, when a setting
        cannot be met.
        """
        device = _device(config)
        dtype = loader.default_dtype(device) if config.dtype == "auto" else getattr(torch, config.dtype)
        # Intra-op threads are a property of the calling thread, which is this one from now on.
        torch.set_num_threads(config.threads or _num_cores())
        with torch.inference_mode():
            try:
                model = loader.load(files, dtype, device, on_bytes)
            except loader.ModelError as error:
                raise ModelError(str(error)) from error
            kv_cache = KVCache.allocate(model.spec, config, dtype, device)
        return cls(
            model,
            kv_cache,
            num_slots=config.max_num_seqs,
            max_model_len=_max_model_len(config, model.spec.max_position, kv_cache.num_tokens),
            eos_token_ids=files.eos_token_ids,
        )

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Compute a step. Raises whatever goes wrong in it; the runner stays usable."""
        start = time.perf_counter()
        with torch.inference_mode():
            batch = build_batch(plan, self._slots, self._kv_cache.page_size, self._device)
            hidden = self._model(batch.forward, self._kv_cache.layers)
            if batch.slots_host:
                logits = self._model.logits(hidden[batch.logits_positions])
                tokens = self._sampler(logits, batch)
            else:
                tokens = batch.slots
        return LaunchedStep(plan, tokens, start, time.perf_counter())


def _num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _device(config: EngineConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ValueError("device: cuda was asked for, but torch finds no usable CUDA device")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


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
