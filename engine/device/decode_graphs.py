"""Decode steps as CUDA graphs: one forward and two sampling graphs per batch size of a ladder.

Launching a 32-layer step kernel by kernel costs the host 7 to 9 ms, replaying its graph 20 to 50 µs. Every
input that changes between steps is read from one staging tensor or from the state slots, so a replay needs
one copy in. Padded rows use the last slot and the last page, which belong to no sequence.
"""

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from engine.device.capture import NEW_PAGES, POSITIONS, SLOTS, capture, ladder
from engine.device.sampler import Sampled, Sampler
from engine.device.slots import StateSlots
from engine.outputs import NO_PAGE, StepPlan
from kernels.kv_layer import KVLayer
from kernels.paged_attention import AttentionBatch
from kernels.step_inputs import decode_inputs
from models.decoder import Decoder
from models.forward_batch import ForwardBatch

NUM_PINNED_BUFFERS = 4


@dataclass(frozen=True)
class CapturedSampling:
    """A SamplingProgram of graphs, which write to the same tensors at every replay."""

    plain_graph: torch.cuda.CUDAGraph
    full_graph: torch.cuda.CUDAGraph
    plain_samples: Sampled
    full_samples: Sampled

    def plain(self) -> Sampled:
        self.plain_graph.replay()
        return self.plain_samples

    def full(self, *, with_logprobs: bool) -> Sampled:
        self.full_graph.replay()
        return self.full_samples


class DecodeGraphs:
    """Captures and replays. `staging` int64 [2 + num_groups, max_num_seqs]: slot, position, and of each KV
    group the new page (-1: none).

    `logits` fp32 [max_num_seqs, vocab_size] are written by a forward pass, which need not be one of decode
    rows, and read by sampling, together with slots and positions of `staging`.
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
        self._forwards: dict[int, torch.cuda.CUDAGraph] = {}
        self._samplings: dict[int, CapturedSampling] = {}
        num_rows = NEW_PAGES + slots.page_table.shape[0]
        self.staging = torch.zeros(num_rows, max_num_seqs, dtype=torch.int64, device=slots.last_token.device)
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
        self.staging[SLOTS] = self._slots.padding_slot
        self.staging[NEW_PAGES:] = NO_PAGE
        console = Console(stderr=True)
        for size in track(self.sizes[::-1], "capturing CUDA graphs", console=console, transient=True):
            # Kernels are compiled and workspaces allocated outside the capture.
            self._forward(size)
            self._sample_plain(size)
            self._sample_full(size)
            torch.cuda.synchronize()
            self._forwards[size], _ = capture(self._pool, partial(self._forward, size))
            plain, plain_samples = capture(self._pool, partial(self._sample_plain, size))
            full, full_samples = capture(self._pool, partial(self._sample_full, size))
            self._samplings[size] = CapturedSampling(plain, full, plain_samples, full_samples)

    def _sample_plain(self, size: int) -> Sampled:
        return self._sampler.plain(*self._before_sampling(size))

    def _sample_full(self, size: int) -> Sampled:
        return self._sampler.full(*self._before_sampling(size), with_logprobs=True)

    def _before_sampling(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.logits[:size], self.staging[SLOTS, :size], self.staging[POSITIONS, :size] + 1

    def fits(self, plan: StepPlan) -> bool:
        """Return True if a graph can compute this step: it has nothing but decode rows."""
        return not (plan.token_ids or plan.page_copies) and plan.num_rows <= self.sizes[-1]

    def _padded_size(self, num_rows: int) -> int:
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def sampling(self, num_logits: int) -> CapturedSampling:
        """Return the sampling of this many rows of `logits`, whichever forward pass wrote them."""
        return self._samplings[self._padded_size(num_logits)]

    def replay(self, plan: StepPlan) -> None:
        """Stage the rows of a step with one copy to the device and compute their `logits`."""
        num_rows = plan.num_rows
        size = self._padded_size(num_rows)
        # A copy in flight reads its buffer until the device gets there, at most two steps from now.
        buffer = next(self._pinned)
        columns = buffer.numpy()
        columns[:NEW_PAGES, :num_rows] = plan.slots, plan.starts
        columns[NEW_PAGES:, :num_rows] = NO_PAGE
        if plan.new_pages:
            for row in plan.new_pages:
                self._slots.take_columns(plan.slots[row], 1, is_new=False)
            pages = np.array(list(plan.new_pages.values()), np.int64)[:, :, 0].T
            columns[NEW_PAGES:, list(plan.new_pages)] = self._slots.to_group_pages(pages)
        columns[:NEW_PAGES, num_rows:size] = [[self._slots.padding_slot], [0]]
        columns[NEW_PAGES:, num_rows:size] = NO_PAGE
        self.staging.copy_(buffer, non_blocking=True)
        self._forwards[size].replay()

    def _forward(self, size: int) -> None:
        """Compute the logits of `size` staged decode rows."""
        inputs = decode_inputs(
            self.staging[:, :size], self._slots.last_token, self._slots.page_table, self._page_size
        )
        attention = tuple(
            AttentionBatch(
                page_table=page_table,
                query_start=self._query_start[: size + 1],
                context_lens=inputs.context_lens,
                slot_mapping=slot_mapping,
                num_decode_rows=size,
            )
            for page_table, slot_mapping in zip(inputs.page_table, inputs.slot_mapping, strict=True)
        )
        row_slots, positions = self.staging[SLOTS, :size], self.staging[POSITIONS, :size]
        states, is_long = self._slots.layer_states, self._slots.is_long
        batch = ForwardBatch(inputs.token_ids, positions, attention, states, row_slots, is_long)
        self._model.logits(self._model(batch, self._kv_layers), self.logits[:size])
