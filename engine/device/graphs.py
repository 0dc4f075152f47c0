"""Decode steps as CUDA graphs: one forward and one sampling graph per batch size of a ladder.

Launching a 32-layer step kernel by kernel costs the host 7 to 9 ms, replaying its graph 20 to 50 µs. Every
input that changes between steps is read from one staging tensor or from the state slots, so a replay needs
one copy in. Padded rows belong to the last slot and write to the last page, which nobody owns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.device.slots import StateSlots
from engine.outputs import Row, StepPlan
from kernels.paged_attention import AttentionBatch
from models.decoder import Decoder, ForwardBatch

# Rows of the staging tensor.
SLOTS, POSITIONS, NEW_PAGES = range(3)
NO_PAGE = -1
NUM_PINNED_BUFFERS = 4


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph: fine steps where a step is short, so padding costs at most an eighth."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs + 1, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


@dataclass(frozen=True)
class DecodeGraph:
    """The graphs of one batch size, and what they write: logits [size, vocab_size] fp32, tokens [size]."""

    forward: torch.cuda.CUDAGraph
    sample: torch.cuda.CUDAGraph
    logits: torch.Tensor
    tokens: torch.Tensor


class DecodeGraphs:
    """Captures and replays. `staging` int64 [3, max_num_seqs]: slot, position, and new page (-1: none)."""

    def __init__(
        self,
        model: Decoder,
        kv_layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        slots: StateSlots,
        sample: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        max_num_seqs: int,
    ) -> None:
        self._model = model
        self._kv_layers = kv_layers
        self._slots = slots
        self._sample = sample
        self._page_size = kv_layers[0][0].shape[1]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, DecodeGraph] = {}
        self.staging = torch.zeros(3, max_num_seqs, dtype=torch.int64, device=slots.last_token.device)
        shape = tuple(self.staging.shape)
        self._pinned = [
            torch.zeros(shape, dtype=torch.int64, pin_memory=True) for _ in range(NUM_PINNED_BUFFERS)
        ]
        self._num_staged = 0
        self.sizes = ladder(max_num_seqs)

    def capture(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Capture all sizes, largest first so that the smaller ones fit into its memory."""
        self.staging[SLOTS] = self._slots.nobody
        self.staging[NEW_PAGES] = NO_PAGE
        for index, size in enumerate(reversed(self.sizes)):
            self._sample(self._logits(size), self.staging[SLOTS, :size], self.staging[POSITIONS, :size])
            torch.cuda.synchronize()  # kernels are compiled and workspaces allocated outside the capture
            forward, sampling = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(forward, pool=self._pool, stream=torch.cuda.current_stream()):
                logits = self._logits(size)
            with torch.cuda.graph(sampling, pool=self._pool, stream=torch.cuda.current_stream()):
                tokens = self._sample(logits, self.staging[SLOTS, :size], self.staging[POSITIONS, :size] + 1)
            self._graphs[size] = DecodeGraph(forward, sampling, logits, tokens)
            if on_progress is not None:
                on_progress(index + 1, len(self.sizes))

    def fits(self, plan: StepPlan) -> bool:
        """Whether every row is one sampled token that brings at most one page."""
        return plan.num_decode_rows == len(plan.rows) <= self.sizes[-1] and all(
            row.sample and len(row.new_pages) <= 1 for row in plan.rows
        )

    def stage(self, rows: Sequence[Row]) -> DecodeGraph:
        """Stage the rows of a step, with one copy to the device; returns the graph to replay."""
        size = next(size for size in self.sizes if size >= len(rows))
        # A copy in flight reads its buffer until the device gets there, at most two steps from now.
        buffer = self._pinned[self._num_staged % len(self._pinned)]
        self._num_staged += 1
        self._slots.start(rows)
        for row in rows:
            self._slots.claim_columns(row)
        padding = size - len(rows)
        columns = (
            [row.slot for row in rows] + [self._slots.nobody] * padding,
            [row.start for row in rows] + [0] * padding,
            [row.new_pages[0] if row.new_pages else NO_PAGE for row in rows] + [NO_PAGE] * padding,
        )
        buffer.numpy()[:, :size] = columns
        known = [(row.slot, row.token_ids[0]) for row in rows if row.token_ids is not None]
        if known:
            index = torch.tensor(known, device=self.staging.device)
            self._slots.last_token[index[:, 0]] = index[:, 1]
        self.staging.copy_(buffer, non_blocking=True)
        return self._graphs[size]

    def _logits(self, size: int) -> torch.Tensor:
        """Forward pass of `size` decode rows that are staged."""
        slots, positions = self.staging[SLOTS, :size], self.staging[POSITIONS, :size]
        new_pages = self.staging[NEW_PAGES, :size]
        columns = positions // self._page_size
        table = self._slots.page_table
        pages = torch.where(new_pages >= 0, new_pages, table[slots, columns].to(torch.int64))
        table[slots, columns] = pages.to(torch.int32)
        attention = AttentionBatch(
            page_table=table[slots],
            query_start=torch.arange(size + 1, dtype=torch.int32, device=slots.device),
            context_lens=(positions + 1).to(torch.int32),
            slot_mapping=pages * self._page_size + positions % self._page_size,
            num_decode_rows=size,
        )
        batch = ForwardBatch(
            token_ids=self._slots.last_token[slots], positions=positions, attention=attention
        )
        return self._model.logits(self._model(batch, self._kv_layers))
