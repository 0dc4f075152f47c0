"""Attention calls at the shapes of an 8B and a 1B Llama, with the bytes and FLOPs that each needs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from engine.bench.probe import Probe
from kernels.attention_batch import AttentionBatch, AttentionOptions
from kernels.kv_layer import KVLayer, KVStorage
from kernels.kv_values import write_heads
from kernels.paged_attention import paged_attention


@dataclass(frozen=True)
class Heads:
    """Attention shape of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA_8B = Heads("8B", 32, 8, 128)
LLAMA_1B = Heads("1B", 32, 8, 64)
TINY = Heads("tiny", 4, 2, 16)

Rows = list[tuple[int, int]]  # (query_len, context_len) each


class AttentionCase(NamedTuple):
    """One step: rows of a model's shape over pages of some size, of a `--kv-dtype`."""

    heads: Heads
    page_size: int
    rows: Rows
    kv_dtype: str = "auto"

    def __str__(self) -> str:
        lengths = sorted({length for _, length in self.rows})
        context = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]}-{lengths[-1]}"
        queries = f"{self.rows[0][0]} of " if self.rows[0][0] > 1 else ""
        kv_dtype = "" if self.kv_dtype == "auto" else f", {self.kv_dtype}"
        return f"{self.heads.name}, {len(self.rows)} x {queries}{context}, page {self.page_size}{kv_dtype}"

    def storage(self, dtype: torch.dtype) -> KVStorage:
        """Return how keys and values are stored for a model of a dtype."""
        return KVStorage.of(self.kv_dtype, dtype, {self.heads.head_dim})

    def cost(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return (bytes, FLOPs): every key and value read once, every visible score computed once."""
        heads = self.heads
        values = sum(length for _, length in self.rows) * heads.num_kv_heads * heads.head_dim
        kv = 2 * self.storage(dtype).num_bytes(values)
        q = sum(n for n, _ in self.rows) * 2 * heads.num_heads * heads.head_dim
        scores = sum(n * length - n * (n - 1) / 2 for n, length in self.rows)
        return float(kv + q * dtype.itemsize), 4 * scores * heads.num_heads * heads.head_dim


# Pages of 1 and of 16 tokens show the cost of gathering token by token.
DECODE = [
    AttentionCase(LLAMA_8B, 16, [(1, 512)]),
    AttentionCase(LLAMA_8B, 16, [(1, 512)] * 16),
    AttentionCase(LLAMA_8B, 16, [(1, 512)] * 64),
    AttentionCase(LLAMA_8B, 1, [(1, 512)] * 64),
    AttentionCase(LLAMA_8B, 64, [(1, 512)] * 64),
    AttentionCase(LLAMA_8B, 16, [(1, 640)] * 256),
    AttentionCase(LLAMA_8B, 1, [(1, 640)] * 256),
    AttentionCase(LLAMA_8B, 16, [(1, 64 + 5 * i) for i in range(256)]),
    AttentionCase(LLAMA_8B, 16, [(1, 8192)]),
    AttentionCase(LLAMA_8B, 16, [(1, 32768)]),
    AttentionCase(LLAMA_8B, 16, [(1, 8192)] * 16),
    AttentionCase(LLAMA_1B, 16, [(1, 512)]),
    AttentionCase(LLAMA_1B, 16, [(1, 512)] * 16),
    AttentionCase(LLAMA_1B, 16, [(1, 512)] * 64),
    AttentionCase(LLAMA_1B, 16, [(1, 640)] * 256),
    *(
        AttentionCase(LLAMA_8B, 16, [(1, context)] * rows, kv_dtype)
        for kv_dtype in ("fp8", "int8", "int4")
        for rows, context in ((64, 512), (256, 640), (1, 8192), (16, 8192))
    ),
]
PREFILL = [
    AttentionCase(LLAMA_8B, 16, [(512, 512)]),
    AttentionCase(LLAMA_8B, 16, [(2048, 2048)]),
    AttentionCase(LLAMA_8B, 16, [(8192, 8192)]),
    AttentionCase(LLAMA_8B, 1, [(8192, 8192)]),
    AttentionCase(LLAMA_8B, 64, [(8192, 8192)]),
    AttentionCase(LLAMA_8B, 16, [(512, 512)] * 16),
    AttentionCase(LLAMA_8B, 16, [(2048, 8192)]),
    AttentionCase(LLAMA_8B, 16, [(20, 8192)]),
    AttentionCase(LLAMA_1B, 16, [(2048, 2048)]),
    AttentionCase(LLAMA_1B, 16, [(8192, 8192)]),
    *(AttentionCase(LLAMA_8B, 16, [(8192, 8192)], kv_dtype) for kv_dtype in ("fp8", "int8", "int4")),
]
TINY_DECODE = [AttentionCase(TINY, 16, [(1, 20), (1, 5)], kv_dtype) for kv_dtype in ("auto", "int8")]
TINY_PREFILL = [AttentionCase(TINY, 16, [(20, 33)], kv_dtype) for kv_dtype in ("auto", "int4")]


class AttentionInputs(NamedTuple):
    """The arguments of `paged_attention`, in order."""

    q: torch.Tensor
    kv: KVLayer
    batch: AttentionBatch
    options: AttentionOptions


def attention_inputs(probe: Probe, case: AttentionCase) -> AttentionInputs:
    """Return the inputs of a step, on scattered pages."""
    heads, page_size, rows, _ = case
    pages = [-(-length // page_size) for _, length in rows]
    storage, slots = case.storage(probe.dtype), sum(pages) * page_size
    tensors = storage.allocate(
        sum(pages),
        page_size * heads.num_kv_heads * heads.head_dim,
        lambda dtype, *shape: torch.zeros(shape, dtype=dtype, device=probe.device),
    )
    kv = storage.layer(tensors, page_size, heads.num_kv_heads, heads.head_dim)
    new = (slots, heads.num_kv_heads, heads.head_dim)
    write_heads(kv, torch.arange(slots, device=probe.device), probe.randn(*new), probe.randn(*new))
    permutation = torch.randperm(sum(pages), dtype=torch.int32, device=probe.device)
    table = torch.zeros(len(rows), max(pages), dtype=torch.int32, device=probe.device)
    for i, some in enumerate(permutation.split(pages)):
        table[i, : len(some)] = some
    query_lens, context_lens = [n for n, _ in rows], [length for _, length in rows]
    num_tokens = sum(query_lens)
    batch = AttentionBatch(
        page_table=table,
        query_start=torch.tensor([0, *query_lens], device=probe.device).cumsum(0).to(torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=probe.device),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=probe.device),
        num_decode_rows=query_lens.count(1),
        query_lens=query_lens,
        context_lens_host=context_lens,
    )
    options = AttentionOptions(heads.head_dim**-0.5)
    q = probe.randn(num_tokens, heads.num_heads, heads.head_dim)
    return AttentionInputs(q, kv, batch, options)


def attention_calls(
    probe: Probe, cases: list[AttentionCase]
) -> Iterator[tuple[AttentionCase, Callable[[], object]]]:
    """Yield each case with its call. Inputs are made case by case: all would fill a small device."""
    for case in cases:
        yield case, partial(paged_attention, *attention_inputs(probe, case))
