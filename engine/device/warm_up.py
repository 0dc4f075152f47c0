"""Computes steps before a model serves, so that none of its requests waits for a compiler."""

import logging
import time
from collections.abc import Callable

from engine.device.kv_cache import KVCache
from engine.outputs import Row, SlotInit, StepPlan
from engine.request import SamplingParams
from kernels.cpu import compiler
from models.decoder import Decoder

logger = logging.getLogger("monoloop.engine")

_PROMPT_VALUES = (1 << 16) + 1  # of the residual stream: kernels use several threads from here on
_SLOW_SECONDS = 1.0


def compile_kernels(
    launch: Callable[[StepPlan], object], model: Decoder, kv_cache: KVCache, max_tokens: int
) -> None:
    """Launch a prompt of `max_tokens` at most and a decode step, which call all kernels of a CPU.

    They are compiled, or read from a cache. The steps use slot 0 and the first pages, which hold nothing
    yet and are overwritten by the first sequence.
    """
    if model.device.type != "cpu" or not compiler.is_available():
        return
    start = time.perf_counter()
    num_groups = len(kv_cache.windows)
    length = min(-(-_PROMPT_VALUES // model.spec.hidden_size), max_tokens, kv_cache.num_tokens - 1)
    if length < 1:
        return
    num_pages = length // kv_cache.page_size + 1
    pages = tuple(tuple(range(group * num_pages, (group + 1) * num_pages)) for group in range(num_groups))
    prompt = (0,) * length
    init = SlotInit(SamplingParams(max_tokens=2, temperature=0.0), 0, prompt, ())
    num_logits = 0 if model.spec.num_labels else 1
    launch(StepPlan.of(0, [Row(0, 0, 0, prompt, num_logits, pages, init)]))
    if num_logits:
        launch(StepPlan.of(1, [Row(0, 0, length)]))
    seconds = time.perf_counter() - start
    if seconds > _SLOW_SECONDS:
        logger.info("compiled the CPU kernels in %.1f s", seconds)
