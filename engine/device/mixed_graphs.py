"""Steps with prompts in them as CUDA graphs, up to the wanted tokens' last layer: one per number of tokens.

Launching a layer kernel by kernel costs the host 0.4 to 1 ms, and several times that while the event loop is
busy: each call into torch gives the GIL up and must win it back. A few hundred tokens take the device less.
Which rows a step has, and how long they are, the attention kernels read on the device, so one graph serves
every step of its size. Padded tokens belong to no row and write to a page that nobody owns.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import torch
from rich.console import Console
from rich.progress import track

from engine.device.graphs import capture
from kernels.paged_attention import AttentionBatch
from models.decoder import Decoder, ForwardBatch

# (up to, in steps of): up to the first a layer's weights take longer than its products.
SIZES = ((512, 64), (2048, 128), (8192, 256))
LARGEST_SIZE = SIZES[-1][0]

# Rows of the static inputs.
TOKEN_IDS, POSITIONS, SLOTS = range(3)


def graph_sizes(token_budget: int) -> list[int]:
    """Numbers of tokens worth graphs, ascending; the last is the budget."""
    sizes, size = {token_budget}, 0
    for limit, step in SIZES:
        while size < limit:
            size += step
            sizes.add(size)
    return sorted(size for size in sizes if size <= token_budget)


def padded_size(sizes: Sequence[int], num_tokens: int) -> int | None:
    """The size that a step of `num_tokens` is padded to; None if none is near."""
    index = bisect_left(sizes, num_tokens)
    if index == len(sizes) or sizes[index] > max(num_tokens, LARGEST_SIZE):
        return None
    return sizes[index]


class MixedGraphs:
    """Captures and replays.

    All sizes work in the same tensors: `inputs` int64 [3, token_budget] (token ids, positions, KV slots),
    what an AttentionBatch of `max_num_seqs` rows holds, and, for what comes out, `mixed` and `residual`.
    """

    def __init__(
        self,
        model: Decoder,
        kv_layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        token_budget: int,
        max_num_seqs: int,
        max_pages: int,
        dummy_slot: int,
    ) -> None:
        self._model = model
        self._kv_layers = kv_layers
        self._dummy_slot = dummy_slot
        self.sizes = graph_sizes(token_budget)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        device = model.device
        attention = model.spec.layers[-1].attention
        self._inputs = torch.zeros(3, token_budget, dtype=torch.int64, device=device)
        self._inputs[SLOTS] = dummy_slot
        self._page_table = torch.zeros(max_num_seqs, max_pages, dtype=torch.int32, device=device)
        self._query_start = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._context_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._num_rows = torch.zeros(1, dtype=torch.int32, device=device)
        width = attention.num_heads * attention.head_dim
        self._mixed = torch.zeros(token_budget, width, dtype=model.dtype, device=device)
        self._residual = torch.zeros(token_budget, model.spec.hidden_size, dtype=model.dtype, device=device)

    def capture(self) -> None:
        """Capture all sizes, largest first so that the smaller ones fit into its memory."""
        console = Console(stderr=True)
        for size in track(
            self.sizes[::-1], "capturing CUDA graphs of prompts", console=console, transient=True
        ):
            compute = partial(self._compute, size)
            compute()  # kernels are compiled and workspaces allocated outside the capture
            torch.cuda.synchronize()
            self._graphs[size], _ = capture(self._pool, compute)

    def _compute(self, size: int) -> None:
        """What a step of `size` tokens launches, but for its end."""
        token_ids, positions, slots = self._inputs[:, :size]
        num_rows = min(size, self._context_lens.shape[0])
        attention = AttentionBatch(
            page_table=self._page_table[:num_rows],
            query_start=self._query_start[: num_rows + 1],
            context_lens=self._context_lens[:num_rows],
            slot_mapping=slots,
            num_decode_rows=num_rows,
            num_rows=self._num_rows,
        )
        batch = ForwardBatch(token_ids, positions, attention)
        _, residual = self._model.begin(batch, self._kv_layers, self._mixed[:size])
        self._residual[:size].copy_(residual)

    def size_for(self, num_tokens: int) -> int | None:
        """The size of the graph that computes a step of `num_tokens`, None if none does."""
        return padded_size(self.sizes, num_tokens)

    def forward(self, batch: ForwardBatch, size: int) -> torch.Tensor:
        """What the model returns for a batch that the graph of `size` tokens can compute."""
        attention = batch.attention
        num_tokens, (num_rows, num_pages) = batch.token_ids.shape[0], attention.page_table.shape
        inputs = self._inputs
        inputs[TOKEN_IDS, :num_tokens] = batch.token_ids
        inputs[POSITIONS, :num_tokens] = batch.positions
        inputs[SLOTS, :num_tokens] = attention.slot_mapping
        inputs[SLOTS, num_tokens:size] = self._dummy_slot
        self._page_table[:num_rows, :num_pages] = attention.page_table
        self._context_lens[:num_rows] = attention.context_lens
        self._query_start[:num_rows] = attention.query_start[:-1]
        self._query_start[num_rows:] = num_tokens
        self._num_rows.fill_(num_rows)
        self._graphs[size].replay()
        return self._model.end(self._mixed[:num_tokens], self._residual[:num_tokens], batch.wanted)
