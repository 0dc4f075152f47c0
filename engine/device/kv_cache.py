"""The keys and values of every layer, in pages."""

import math
import os
from dataclasses import dataclass

import numpy as np
import torch

from engine.config import EngineConfig
from engine.device.devices import does_not_fit
from engine.device.readouts import prompt_logprobs
from kernels.kv_layer import KVLayer
from kernels.paged_attention import AttentionBatch
from models.decoder import Decoder
from models.forward_batch import ForwardBatch
from models.spec import DecoderSpec

# A CPU shares its memory with everything else on the machine, and more tokens than this are rarely of use to
# one that computes a few hundred a second.
CPU_MEMORY_SHARE = 0.25
CPU_MAX_TOKENS = 65_536
# Of what a GPU has left beside weights and the largest step; the rest is for graphs and fragmentation.
CUDA_MEMORY_SHARE = 0.92


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer, of num_pages + 1 pages: padded rows write to the last page."""

    layers: tuple[KVLayer, ...]
    num_pages: int
    page_size: int

    @classmethod
    def allocate(cls, model: Decoder, config: EngineConfig, token_budget: int) -> "KVCache":
        """Size the pool from the settings or from free memory, and allocate it.

        Raises ValueError when it does not fit.
        """
        page_bytes = bytes_per_token(model.spec, model.dtype) * config.page_size
        if config.kv_tokens is not None:
            num_pages = -(-config.kv_tokens // config.page_size)
        elif model.device.type == "cuda":
            num_pages = _free_cuda_bytes(model, config, token_budget) // page_bytes
        else:
            max_tokens = max(CPU_MAX_TOKENS, model.spec.max_position)
            num_pages = min(_free_cpu_bytes() // page_bytes, max_tokens // config.page_size)
        if num_pages < 1:
            hint = "" if config.gpu_memory_utilization is None else "; raise gpu_memory_utilization"
            raise ValueError(f"kv_tokens: no memory is left for KV pages of {page_bytes:,} bytes each{hint}")
        try:
            layers = _layers(model, num_pages, config.page_size)
        except (
            RuntimeError,
            MemoryError,
            ValueError,
        ) as error:  # ValueError: numpy's, for what no array can be
            raise ValueError(
                f"kv_tokens: a pool of {num_pages * config.page_size:,} tokens takes "
                f"{num_pages * page_bytes / 2**30:.2f} GiB, more than is free"
            ) from error
        return cls(layers, num_pages, config.page_size)

    @property
    def num_tokens(self) -> int:
        """Tokens the pool holds."""
        return self.num_pages * self.page_size


def bytes_per_token(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token in all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize


def _layers(model: Decoder, num_pages: int, page_size: int) -> tuple[KVLayer, ...]:
    """Zeros, not empty: a masked position still enters a product with weight 0, and 0 * NaN is NaN.

    numpy's zeros come from the kernel untouched, so memory is used as pages are; torch writes its own.
    """
    shape = (num_pages + 1, page_size, model.spec.num_kv_heads, model.spec.head_dim)

    def zeros() -> torch.Tensor:
        if model.device.type == "cpu":
            num_bytes = math.prod(shape) * model.dtype.itemsize
            return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(model.dtype).view(shape)
        return torch.zeros(shape, dtype=model.dtype, device=model.device)

    return tuple(KVLayer(zeros(), zeros()) for _ in range(model.spec.num_layers))


def _free_cpu_bytes() -> int:
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * CPU_MEMORY_SHARE)


def _free_cuda_bytes(model: Decoder, config: EngineConfig, token_budget: int) -> int:
    """Return the bytes for the KV pool beside weights and the largest step.

    One such step is run, its prompt's log-probabilities included, on pages that are not read again.
    """
    device, page_size = model.device, config.page_size
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    num_tokens = min(token_budget, model.spec.max_position)
    positions = torch.arange(num_tokens, device=device)
    attention = AttentionBatch(
        page_table=torch.zeros(1, -(-num_tokens // page_size), dtype=torch.int32, device=device),
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        slot_mapping=positions % page_size,
        num_decode_rows=0,
        query_lens=[num_tokens],
        context_lens_host=[num_tokens],
    )
    try:
        hidden = model(
            ForwardBatch(torch.zeros_like(positions), positions, attention), _layers(model, 1, page_size)
        )
        prompt_logprobs(model, hidden, torch.zeros_like(positions))
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"token_budget: beside the weights a step of {num_tokens} tokens {does_not_fit(device)}; lower it"
        ) from error
    torch.cuda.synchronize(device)
    step_bytes = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return cuda_pool_bytes(free, total, step_bytes, config.gpu_memory_utilization)


def cuda_pool_bytes(free: int, total: int, step_bytes: int, utilization: float | None) -> int:
    """Return the bytes for the KV pool of a GPU that has `free` of `total` bytes left after loading.

    With `utilization`, all that is in use by then, steps and pool together take that share of `total`.
    """
    if utilization is None:
        return int((free - step_bytes) * CUDA_MEMORY_SHARE)
    return int(total * utilization) - (total - free) - step_bytes
