"""Decode steps as CUDA graphs: one forward and two sampling graphs per batch size of a ladder.

Launching a 32-layer step kernel by kernel costs the host 7 to 9 ms, replaying its graph 20 to 50 µs. Every
input that changes between steps is read from one staging tensor or from the state slots, so a replay needs
one copy in. Padded rows belong to the last slot and write to the last page, which nobody owns.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track

from engine.device.sampler import Sampled, Sampler
from engine.device.slots import StateSlots
from engine.outputs import NO_PAGE, DecodeRows, StepPlan
from kernels.decode_inputs import decode_inputs
from kernels.kv_layer import KVLayer
from kernels.paged_attention import AttentionBatch
from models.decoder import Decoder
from models.forward_batch import ForwardBatch

# Rows of the staging tensor.
SLOTS, POSITIONS, NEW_PAGES = range(3)
NUM_PINNED_BUFFERS = 4

T = TypeVar("T")


def capture(pool: Any, compute: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """What a call launches, as a graph with its memory in `pool`; and what the call returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
        result = compute()
    return graph, result


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph: fine steps where a step is short, so padding costs at most an eighth."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs + 1, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


@dataclass(frozen=True)
class DecodeGraph:
    """The graphs of one batch size, and the samples they write."""

    forward: torch.cuda.CUDAGraph
    plain: torch.cuda.CUDAGraph
    full: torch.cuda.CUDAGraph
    plain_samples: Sampled
    full_samples: Sampled


class DecodeGraphs:
    """Captures and replays. `staging` int64 [3, max_num_seqs]: slot, position, and new page (-1: none).

    `logits` fp32 [max_num_seqs, vocab_size] stand between a forward pass, which may be another than of decode
    rows, and sampling. That reads slots and positions from `staging`.
    """

    def __init__(
        self,
        model: Decoder,
        kv_layers: Sequence[KVLayer],
        slots: StateSlots,
        sampler: Sampler,
        max_num_seqs: int,
    ) -> None:
        self._model = model
        self._kv_layers = kv_layers
        self._slots = slots
        self._sampler = sampler
        self._page_size = kv_layers[0].keys.shape[1]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, DecodeGraph] = {}
        self.staging = torch.zeros(3, max_num_seqs, dtype=torch.int64, device=slots.last_token.device)
        self.logits = torch.zeros(max_num_seqs, model.spec.vocab_size, device=self.staging.device)
        self._query_start = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=self.staging.device)
        shape = tuple(self.staging.shape)
        self._pinned = itertools.cycle(
            [torch.zeros(shape, dtype=torch.int64, pin_memory=True) for _ in range(NUM_PINNED_BUFFERS)]
        )
        self.sizes = ladder(max_num_seqs)

    def capture(self) -> None:
        """Capture all sizes, largest first so that the smaller ones fit into its memory."""
        self._slots.allocate_counts()
        self.staging[SLOTS] = self._slots.nobody
        self.staging[NEW_PAGES] = NO_PAGE
        console = Console(stderr=True)
        for size in track(self.sizes[::-1], "capturing CUDA graphs", console=console, transient=True):
            # Kernels are compiled and workspaces allocated outside the capture.
            self._forward(size)
            self._sample_plain(size)
            self._sample_full(size)
            torch.cuda.synchronize()
            forward, _ = capture(self._pool, partial(self._forward, size))
            plain, plain_samples = capture(self._pool, partial(self._sample_plain, size))
            full, full_samples = capture(self._pool, partial(self._sample_full, size))
            self._graphs[size] = DecodeGraph(forward, plain, full, plain_samples, full_samples)

    def _sample_plain(self, size: int) -> Sampled:
        return self._sampler.plain(*self._before_sampling(size))

    def _sample_full(self, size: int) -> Sampled:
        return self._sampler.full(*self._before_sampling(size), with_logprobs=True)

    def _before_sampling(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.logits[:size], self.staging[SLOTS, :size], self.staging[POSITIONS, :size] + 1

    def fits(self, plan: StepPlan) -> bool:
        """Whether a graph can compute this step: nothing but decode rows."""
        return not plan.chunks and not plan.page_copies and len(plan.decode.slots) <= self.sizes[-1]

    def _padded_size(self, num_rows: int) -> int:
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def graph_for(self, num_rows: int) -> DecodeGraph:
        """The graphs for so many rows, of which the sampling ones may follow another forward pass."""
        return self._graphs[self._padded_size(num_rows)]

    def stage(self, rows: DecodeRows) -> DecodeGraph:
        """Stage the rows of a step, with one copy to the device; returns the graph to replay."""
        num_rows = len(rows.slots)
        size = self._padded_size(num_rows)
        # A copy in flight reads its buffer until the device gets there, at most two steps from now.
        buffer = next(self._pinned)
        columns = buffer.numpy()
        columns[:, :num_rows] = rows.slots, rows.starts, rows.new_pages
        columns[:, num_rows:size] = [[self._slots.nobody], [0], [NO_PAGE]]
        self.staging.copy_(buffer, non_blocking=True)
        return self._graphs[size]

    def _forward(self, size: int) -> None:
        """From `size` decode rows that are staged to their logits."""
        inputs = decode_inputs(
            self.staging[:, :size], self._slots.last_token, self._slots.page_table, self._page_size
        )
        attention = AttentionBatch(
            page_table=inputs.page_table,
            query_start=self._query_start[: size + 1],
            context_lens=inputs.context_lens,
            slot_mapping=inputs.slot_mapping,
            num_decode_rows=size,
        )
        batch = ForwardBatch(inputs.token_ids, self.staging[POSITIONS, :size], attention)
        self._model.logits(self._model(batch, self._kv_layers), self.logits[:size])
