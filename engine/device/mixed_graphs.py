"""CUDA graphs for steps with rows of several tokens.

One of the layers per padded number of tokens, one of the last MLP, norm and LM head per padded number of
logits positions. Sampling uses the graphs of decode steps.

Launching a layer kernel by kernel costs the host 0.4 to 1 ms, and several times that while the event loop is
busy: each call into torch releases the GIL and must win it back. A few hundred tokens take the device less.
The attention kernels read on the device which rows there are and how long they are, so one graph serves every
step of its size. Padded tokens belong to no row and write to a page of no sequence.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.progress import track

from engine.device.capture import POSITIONS, SLOTS, capture, ladder
from engine.device.slots import StateSlots
from kernels.kv_layer import KVLayer
from kernels.paged_attention import AttentionBatch
from kernels.step_inputs import StepInputs
from models.decoder import Decoder
from models.forward_batch import ForwardBatch

# (up to, in steps of): up to the first a layer's weights take longer than its products.
SIZES = ((512, 64), (2048, 128), (8192, 256))
LARGEST_SIZE = SIZES[-1][0]


def graph_sizes(token_budget: int) -> list[int]:
    """Return the numbers of tokens that get a graph, ascending; the last is the budget."""
    sizes, size = {token_budget}, 0
    for limit, step in SIZES:
        while size < limit:
            size += step
            sizes.add(size)
    return sorted(size for size in sizes if size <= token_budget)


def padded_size(sizes: Sequence[int], num_tokens: int) -> int | None:
    """Return the size that a step of `num_tokens` is padded to; None if none is near."""
    index = bisect_left(sizes, num_tokens)
    if index == len(sizes) or sizes[index] > max(num_tokens, LARGEST_SIZE):
        return None
    return sizes[index]


@dataclass(frozen=True)
class MixedGraph:
    """The graph of one size, what it reads, and what it computes for Decoder.tail()."""

    layers: torch.cuda.CUDAGraph
    inputs: StepInputs
    attention_out: torch.Tensor
    residual: torch.Tensor


class MixedGraphs:
    """Captures and replays. All sizes work in the first rows of the same tensors.

    `_inputs` have room for `token_budget` tokens and `max_num_seqs` rows; `_attention_out` and `_residual`
    [token_budget, ...]. Sampling finds slots and positions in `staging`, and `logits` fp32
    [max_num_seqs, vocab_size], those of DecodeGraphs.
    """

    def __init__(
        self,
        model: Decoder,
        kv_layers: Sequence[KVLayer],
        *,
        token_budget: int,
        max_num_seqs: int,
        slots: StateSlots,
        staging: torch.Tensor,
        logits: torch.Tensor,
    ) -> None:
        self._model = model
        self._kv_layers = kv_layers
        self.sizes = graph_sizes(token_budget)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, MixedGraph] = {}
        self._tail_sizes = ladder(max_num_seqs)
        self._tails: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits = logits
        self._states = slots.layer_states
        self._is_long = slots.is_long
        device = model.device
        attention = model.spec.layers[-1].attention
        num_groups, _, max_pages = slots.page_table.shape
        inputs = StepInputs.empty(token_budget, max_num_seqs, max_pages, max_num_seqs, device, num_groups)
        for tensor in inputs:
            tensor.zero_()
        page_size = kv_layers[0].keys.shape[1]
        inputs.row_slots.fill_(slots.padding_slot)
        inputs.slot_mapping.copy_(slots.page_table[:, slots.padding_slot, :1] * page_size)
        self._inputs = inputs._replace(logits_slots=staging[SLOTS], logits_positions=staging[POSITIONS])
        width = attention.num_heads * attention.head_dim
        self._attention_out = torch.zeros(token_budget, width, dtype=model.dtype, device=device)
        self._residual = torch.zeros(token_budget, model.spec.hidden_size, dtype=model.dtype, device=device)

    def capture(self) -> None:
        """Capture all sizes, largest first so that the smaller ones fit into its memory."""
        console = Console(stderr=True)
        for size in track(
            self.sizes[::-1], "capturing CUDA graphs of prompts", console=console, transient=True
        ):
            places = self._inputs.with_room_for(size), self._attention_out[:size], self._residual[:size]
            self._graphs[size] = MixedGraph(self._capture(partial(self._compute, *places)), *places)
        for size in self._tail_sizes[::-1]:
            self._tails[size] = self._capture(partial(self._tail, size))

    def _capture(self, compute: Callable[[], None]) -> torch.cuda.CUDAGraph:
        compute()  # kernels are compiled and workspaces allocated outside the capture
        torch.cuda.synchronize()
        graph, _ = capture(self._pool, compute)
        return graph

    def _compute(self, inputs: StepInputs, attention_out: torch.Tensor, residual: torch.Tensor) -> None:
        """Compute the layers of a step of as many tokens as `inputs` have room for."""
        _, stream = self._model.body(self._batch(inputs), self._kv_layers, attention_out)
        residual.copy_(stream)

    def _batch(self, inputs: StepInputs, hidden_indices: torch.Tensor | None = None) -> ForwardBatch:
        """Return the batch of the tokens and rows there is room for in `inputs`."""
        num_rows = min(inputs.token_ids.shape[0], inputs.context_lens.shape[0])
        attention = tuple(
            AttentionBatch(
                page_table=page_table[:num_rows],
                query_start=inputs.query_start[: num_rows + 1],
                context_lens=inputs.context_lens[:num_rows],
                slot_mapping=slot_mapping,
                num_decode_rows=num_rows,
                num_rows=inputs.num_rows,
            )
            for page_table, slot_mapping in zip(inputs.page_table, inputs.slot_mapping, strict=True)
        )
        return ForwardBatch(
            inputs.token_ids,
            inputs.positions,
            attention,
            self._states,
            inputs.row_slots[:num_rows],
            self._is_long,
            hidden_indices,
        )

    def _tail(self, size: int) -> None:
        """Compute the first `size` logits from the output of the layers."""
        batch = self._batch(self._inputs, self._inputs.logits_indices[:size])
        hidden = self._model.tail(self._attention_out, self._residual, batch)
        self._model.logits(hidden, self._logits[:size])

    def graph_for(self, num_tokens: int, num_logits: int) -> MixedGraph | None:
        """Return the graph for a step of these numbers; None if none is near."""
        size = padded_size(self.sizes, num_tokens)
        return None if size is None or num_logits > self._tail_sizes[-1] else self._graphs[size]

    def replay_tail(self, num_logits: int) -> None:
        """Compute the logits of a step that returns nothing else, from the output of its layers."""
        self._tails[self._tail_sizes[bisect_left(self._tail_sizes, num_logits)]].replay()
