"""The keys and values of every layer, in pages."""

import os
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from models.spec import DecoderSpec

# Of what is free when the weights are loaded. A CPU shares its memory with everything else on the machine.
CPU_MEMORY_SHARE = 0.25
CUDA_MEMORY_SHARE = 0.90
# More than this many tokens are rarely of use to a CPU, which computes a few hundred a second.
CPU_MAX_TOKENS = 65_536


@dataclass(frozen=True)
class KVCache:
    """`layers[i]` is the pair (keys, values) of layer i.

    Each is [num_pages + 1, page_size, num_kv_heads, head_dim]. The last page belongs to nobody: padded rows
    write there.
    """

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    num_pages: int
    page_size: int

    @classmethod
    def allocate(
        cls, spec: DecoderSpec, config: EngineConfig, dtype: torch.dtype, device: torch.device
    ) -> "KVCache":
        """Size the pool from the settings or from free memory, and allocate it.

        Raises ValueError when not even one page fits.
        """
        page_bytes = bytes_per_token(spec, dtype) * config.page_size
        if config.kv_tokens is not None:
            num_pages = -(-config.kv_tokens // config.page_size)
        else:
            num_pages = _bytes_for_pool(device) // page_bytes
            if device.type == "cpu":
                num_pages = min(num_pages, max(CPU_MAX_TOKENS, spec.max_position) // config.page_size)
        if num_pages < 1:
            raise ValueError(f"kv_tokens: no memory is left for KV pages of {page_bytes} bytes each")
        shape = (num_pages + 1, config.page_size, spec.num_kv_heads, spec.head_dim)
        # Zeros, not empty: a masked position still enters a product with weight 0, and 0 * NaN is NaN. The
        # zeros of a large CPU tensor come from the kernel untouched, so memory is used as pages are.
        layers = tuple(
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(spec.num_layers)
        )
        return cls(layers, num_pages, config.page_size)

    @property
    def num_tokens(self) -> int:
        """Tokens the pool holds."""
        return self.num_pages * self.page_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for pair in self.layers for tensor in pair)


def bytes_per_token(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token in all layers."""
    return int(2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize)


def _bytes_for_pool(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * CUDA_MEMORY_SHARE)
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * CPU_MEMORY_SHARE)
