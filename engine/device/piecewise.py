"""Steps with prompts in them as CUDA graphs of what stands between their attentions.

Launching a layer kernel by kernel costs the host 0.4 to 1 ms, and several times that while the event loop is
busy: each call into torch gives the GIL up and must win it back. A few hundred tokens take the device less.
How many rows a step has, and how long they are, concerns attention alone, which is launched as ever; all else
sees tokens, and is captured for a ladder of their numbers. Padded tokens write to a page that nobody owns.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import torch
from rich.console import Console
from rich.progress import track

from engine.device.graphs import capture
from models.decoder import Decoder, ForwardBatch

# (up to, in steps of): up to the first a layer's weights take longer than its products.
FINE_SIZES = ((512, 64), (2048, 128))
# Beyond, the device takes longer than the launches do; only a whole budget, which recurs, has graphs there.
LARGEST_FINE_SIZE = FINE_SIZES[-1][0]

# Rows of the static inputs.
TOKEN_IDS, POSITIONS, SLOTS = range(3)


def piecewise_sizes(token_budget: int) -> list[int]:
    """Numbers of tokens worth graphs, ascending; the last is the budget."""
    sizes, size = {token_budget}, 0
    for limit, step in FINE_SIZES:
        while size < limit:
            size += step
            sizes.add(size)
    return sorted(size for size in sizes if size <= token_budget)


def padded_size(sizes: Sequence[int], num_tokens: int) -> int | None:
    """The size that a step of `num_tokens` is padded to; None if none is near."""
    index = bisect_left(sizes, num_tokens)
    if index == len(sizes) or sizes[index] > max(num_tokens, LARGEST_FINE_SIZE):
        return None
    return sizes[index]


class PiecewiseGraphs:
    """Captures and replays the pieces of a forward pass.

    All sizes work in the same tensors: `inputs` int64 [3, token_budget] (token ids, positions, KV slots),
    `queries` and `mixed` (into attention and out of it), `residual`, and `angles`.
    """

    def __init__(
        self,
        model: Decoder,
        kv_layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        token_budget: int,
        dummy_slot: int,
    ) -> None:
        self._model = model
        self._kv_layers = kv_layers
        self._dummy_slot = dummy_slot
        self.sizes = piecewise_sizes(token_budget)
        self._pool = torch.cuda.graph_pool_handle()
        self._pieces: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._inputs = torch.zeros(3, token_budget, dtype=torch.int64, device=model.device)
        self._inputs[SLOTS] = dummy_slot
        self._queries, self._residual, self._angles = model.begin(
            self._inputs[TOKEN_IDS], self._inputs[POSITIONS], self._inputs[SLOTS], kv_layers[0]
        )
        self._queries = self._queries.contiguous()
        self._mixed = torch.zeros_like(self._queries).view(token_budget, -1)

    def capture(self) -> None:
        """Capture all sizes, largest first so that the smaller ones fit into its memory."""
        console = Console(stderr=True)
        for size in track(
            self.sizes[::-1], "capturing CUDA graphs of prompts", console=console, transient=True
        ):
            pieces = self._calls(size)
            for piece in pieces:  # kernels are compiled and workspaces allocated outside the capture
                piece()
            torch.cuda.synchronize()
            self._pieces[size] = [capture(self._pool, piece)[0] for piece in pieces]

    def _calls(self, size: int) -> list[Callable[[], None]]:
        """The pieces of a step of `size` tokens, in order."""
        token_ids, positions, slots = self._inputs[:, :size]
        queries, residual, angles = self._queries[:size], self._residual[:size], self._angles[:size]
        mixed = self._mixed[:size]

        def begin() -> None:
            for target, value in zip(
                (queries, residual, angles),
                self._model.begin(token_ids, positions, slots, self._kv_layers[0]),
                strict=True,
            ):
                target.copy_(value)

        def between(index: int) -> None:
            caches = self._kv_layers[index + 1]
            queries.copy_(self._model.between(index, mixed, residual, angles, slots, caches))

        return [begin, *(partial(between, index) for index in range(len(self._kv_layers) - 1))]

    def size_for(self, num_tokens: int) -> int | None:
        """The size of the graphs that compute a step of `num_tokens`, None if none do."""
        return padded_size(self.sizes, num_tokens)

    def forward(self, batch: ForwardBatch, size: int) -> torch.Tensor:
        """What the model returns for a batch that `size` graphs can compute."""
        attention = batch.attention
        num_tokens = batch.token_ids.shape[0]
        inputs = self._inputs
        inputs[TOKEN_IDS, :num_tokens] = batch.token_ids
        inputs[POSITIONS, :num_tokens] = batch.positions
        inputs[SLOTS, :num_tokens] = attention.slot_mapping
        inputs[SLOTS, num_tokens:size] = self._dummy_slot
        queries, mixed = self._queries[:num_tokens], self._mixed[:num_tokens]
        out = mixed.view(queries.shape)
        for piece, layer, caches in zip(self._pieces[size], self._model.layers, self._kv_layers, strict=True):
            piece.replay()
            layer.attention.mix(queries, attention, *caches, out=out)
        return self._model.end(mixed, self._residual[:num_tokens], batch.wanted)
