"""The keys and values of every layer, in pages."""

import math
import mmap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from engine.config import EngineConfig
from engine.device.batch import trial_batch
from engine.device.devices import does_not_fit
from engine.device.readouts import prompt_logprobs
from engine.machine import available_memory
from kernels.kv_layer import KVLayer, KVStorage
from models.decoder import Decoder

# A CPU shares its memory with everything else on the machine, and more tokens than this are rarely of use to
# one that computes a few hundred a second.
CPU_MEMORY_SHARE = 0.25
CPU_MAX_TOKENS = 65_536
# Of what a GPU has left beside weights and the largest step; the rest is for graphs and fragmentation.
CUDA_MEMORY_SHARE = 0.92


@dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers, in pages that the KV groups of a model share.

    A page is one row of each tensor in `pools`, [num_pages + 1, page elements], which has keys, values, and
    the scales of either if they are quantized, for every layer of the largest group: layer i of any group
    reads entry i. `layers` are views of them, one for
    each layer of the model. A layer with smaller tokens than those of another group sees several pages of
    its own in one: `page_scales`, one for each group. Padded rows write to the last page.
    """

    layers: tuple[KVLayer, ...]
    pools: tuple[tuple[torch.Tensor, ...], ...]
    page_scales: tuple[int, ...]
    windows: tuple[int, ...]
    num_pages: int
    page_size: int

    @classmethod
    def allocate(cls, model: Decoder, config: EngineConfig, token_budget: int) -> "KVCache":
        """Size the pool from the settings or from free memory, and allocate it.

        Raises ValueError when it does not fit.
        """
        check_kv_dtype(config, model.device, model.dtype)
        if model.device.type == "cuda":
            free_bytes = partial(_free_cuda_bytes, model, config, token_budget)
        else:
            free_bytes = partial(cpu_pool_bytes, available_memory())
        num_pages = pages_of_pool(model, config, model.device, free_bytes)
        try:
            return cls.of(model, num_pages, config.page_size, config.kv_dtype)
        except (RuntimeError, OSError, OverflowError) as error:  # torch's, and two of mmap
            num_tokens = num_pages * config.page_size // len(model.spec.kv_groups)
            pool_bytes = num_pages * page_bytes(model, config)
            raise ValueError(
                f"kv_tokens: a pool of {num_tokens:,} tokens takes {pool_bytes / 2**30:.2f} GiB, more than "
                "is free"
            ) from error

    @classmethod
    def of(cls, model: Decoder, num_pages: int, page_size: int, kv_dtype: str = "auto") -> "KVCache":
        """Allocate a pool of `num_pages` pages. Raises what torch and numpy raise when it does not fit."""
        spec, world = model.spec, model.shard.world
        size, storage = _page_values(model, page_size), kv_storage(model, kv_dtype)
        zeros = partial(_zeros, model.device)
        pools = tuple(
            storage.allocate(num_pages + 1, size, zeros)
            for _ in range(max(len(group.layers) for group in spec.kv_groups))
        )
        layers = []
        kv_scales = (kv_dtype == "fp8" and model.kv_scales) or ((1.0, 1.0),) * spec.num_layers
        for layer, (_, index), of_layer in zip(spec.layers, spec.kv_places, kv_scales, strict=True):
            num_kv_heads, head_dim = layer.attention.num_kv_heads // world, layer.attention.head_dim
            layers.append(storage.layer(pools[index], page_size, num_kv_heads, head_dim, *of_layer))
        scales = tuple(size * world // (page_size * group.token_size) for group in spec.kv_groups)
        windows = tuple(group.window for group in spec.kv_groups)
        return cls(tuple(layers), pools, scales, windows, num_pages, page_size)

    @property
    def num_tokens(self) -> int:
        """Tokens the pool holds, with a page in every group."""
        return self.num_pages // len(self.windows) * self.page_size

    @property
    def token_bytes(self) -> int:
        """Memory of one of `num_tokens`, in all layers."""
        page_bytes = sum(pages[0].nbytes for pool in self.pools for pages in pool)
        return len(self.windows) * page_bytes // self.page_size

    def copy_pages(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy pages, int64 [num_copies] each, of all layers of their groups."""
        for pool in self.pools:
            for pages in pool:
                pages[targets] = pages[sources]


def kv_storage(model: Decoder, kv_dtype: str) -> KVStorage:
    """Return how a model's keys and values are stored. Raises ValueError, naming the setting."""
    return KVStorage.of(kv_dtype, model.dtype, {group.head_dim for group in model.spec.kv_groups})


def check_kv_dtype(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError, naming the setting, if the device has no conversion between `dtype` and KV's."""
    can_be_bfloat16 = dtype == torch.bfloat16 or (device.type == "cpu" and dtype == torch.float32)
    if config.kv_dtype == "bfloat16" and not can_be_bfloat16:
        raise ValueError(
            f"kv_dtype: bfloat16 is for models in bfloat16, or on a CPU in float32, and this one is in "
            f"{str(dtype).removeprefix('torch.')} on {device}; leave it out"
        )
    if device.type == "cpu":
        return
    capability = torch.cuda.get_device_capability(device)
    if config.kv_dtype == "fp8" and capability < (8, 9):
        raise ValueError(
            f"kv_dtype: fp8 needs a GPU of compute capability 8.9, and {device} has {capability[0]}."
            f"{capability[1]}; int8 takes nearly as little memory"
        )


def _page_values(model: Decoder, page_size: int) -> int:
    """Values of the keys of a page in one layer: a whole number of pages of every group."""
    return page_size * math.lcm(*(group.token_size // model.shard.world for group in model.spec.kv_groups))


def pages_of_pool(
    model: Decoder, config: EngineConfig, device: torch.device, free_bytes: Callable[[], int]
) -> int:
    """Return the number of pages that the settings ask for, or that fit into the `free_bytes()` of a device.

    Raises ValueError if not even one page fits.
    """
    size = page_bytes(model, config)
    num_groups = len(model.spec.kv_groups)
    if config.kv_tokens is not None:
        num_pages = -(-config.kv_tokens // config.page_size) * num_groups
    elif device.type == "cuda":
        state_bytes = _state_bytes(model) * (config.max_num_seqs + 1)
        num_pages = (free_bytes() - state_bytes) // size
    else:
        max_tokens = max(CPU_MAX_TOKENS, model.spec.max_position)
        num_pages = min(free_bytes() // size, max_tokens // config.page_size * num_groups)
    if num_pages < 1:
        hint = "" if config.gpu_memory_utilization is None else "; raise gpu_memory_utilization"
        raise ValueError(f"kv_tokens: no memory is left for KV pages of {size:,} bytes each{hint}")
    return num_pages


def page_bytes(model: Decoder, config: EngineConfig) -> int:
    """Return the bytes of a page in all tensors of the pool. Raises ValueError, naming the setting."""
    num_layers = max(len(group.layers) for group in model.spec.kv_groups)
    storage = kv_storage(model, config.kv_dtype)
    return 2 * num_layers * storage.num_bytes(_page_values(model, config.page_size))


def _state_bytes(model: Decoder) -> int:
    """Bytes of the layers' fixed-size states for one sequence, which are allocated with the slots."""
    return sum(math.prod(state.shape) * state.dtype.itemsize for state in model.spec.states)


def _zeros(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Zeros, not empty: a masked position still enters a product with weight 0, and 0 * NaN is NaN.

    On a CPU memory is mapped for them and becomes resident as pages are used; an allocator may return memory
    that was used before, and write the zeros. Huge pages would be resident beyond what is used (0.16 GB of a
    pool of 65,536 tokens of SmolLM2-135M with 16,384 used), and decode is not faster with them.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    with suppress(AttributeError, OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def cpu_pool_bytes(available: int) -> int:
    """Return the bytes for the KV pool of a machine with `available` bytes left beside the weights."""
    return int(available * CPU_MEMORY_SHARE)


def _free_cuda_bytes(model: Decoder, config: EngineConfig, token_budget: int) -> int:
    """Return the bytes for the KV pool beside weights and the largest step.

    One such step is run, its prompt's log-probabilities included, on pages that are not read again.
    """
    device, page_size = model.device, config.page_size
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    num_tokens = min(token_budget, model.spec.max_position)
    batch = trial_batch(model, num_tokens, page_size)
    try:
        hidden = model(batch, KVCache.of(model, 1, page_size, config.kv_dtype).layers)
        prompt_logprobs(model, hidden, torch.zeros_like(batch.positions))
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
