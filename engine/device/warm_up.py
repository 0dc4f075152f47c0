"""Runs steps of a model before it serves, on pages of their own."""

import logging
import time

import torch

from engine.device.batch import trial_batch
from engine.device.kv_cache import KVCache
from kernels.cpu import compiler
from models.decoder import Decoder

logger = logging.getLogger("monoloop.engine")

_PROMPT_VALUES = (1 << 16) + 1  # of the residual stream: kernels use several threads from here on
_SLOW_SECONDS = 1.0


def compile_kernels(model: Decoder, page_size: int, kv_dtype: str, token_budget: int) -> None:
    """Run a decode step and a prompt, so that all kernels of a CPU are compiled, or read from their cache."""
    if model.device.type != "cpu" or model.dtype != torch.float32 or not compiler.is_available():
        return
    start = time.perf_counter()
    layers = KVCache.of(model, 1, page_size, kv_dtype).layers
    prompt = min(-(-_PROMPT_VALUES // model.spec.hidden_size), token_budget, model.spec.max_position)
    for num_tokens in (1, prompt):
        hidden = model(trial_batch(model, num_tokens, page_size), layers)
        if not model.spec.num_labels:
            model.logits(hidden[-1:])
    seconds = time.perf_counter() - start
    if seconds > _SLOW_SECONDS:
        logger.info("compiled the CPU kernels in %.1f s; the next start finds them in a cache", seconds)
