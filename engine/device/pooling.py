"""Hidden states -> one vector for each sequence, over as many steps as its prompt takes."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.outputs import Row


def pooled_tokens(rows: Sequence[Row], starts: np.ndarray) -> np.ndarray:
    """Which tokens of a step are pooled, int64 [num_pooled]; row i begins with token `starts[i]`."""
    spans = []
    for row, start in zip(rows, starts.tolist(), strict=False):
        if row.pool is not None:
            spans.append(np.arange(start + row.num_tokens - num_pooled(row), start + row.num_tokens))
    return np.concatenate(spans) if spans else np.zeros(0, np.int64)


def num_pooled(row: Row) -> int:
    """How many of a row's tokens, from its end, enter the vector."""
    if row.pool is None:
        return 0
    return row.num_tokens if row.pool.pooling == "mean" else int(row.pool.is_last)


class Pools:
    """The sums of the slots: fp64 [num_slots + 1, hidden_size], so that it makes no difference to the fp32
    result where a prompt was cut. They exist from the first row that is pooled.
    """

    def __init__(self, num_slots: int, hidden_size: int, device: torch.device) -> None:
        self._shape = (num_slots + 1, hidden_size)
        self._device = device
        self._sums: torch.Tensor | None = None

    def add(self, rows: Sequence[Row], hidden: torch.Tensor) -> tuple[list[int], torch.Tensor] | None:
        """Add the hidden states [num_pooled, hidden_size] of a step's pooled tokens, row after row.

        Returns the sequences whose vectors are whole, and these, fp32 [len(ids), hidden_size]; None if none.
        """
        if self._sums is None:
            self._sums = torch.zeros(self._shape, dtype=torch.float64, device=self._device)
        sums = self._sums
        ids: list[int] = []
        vectors: list[torch.Tensor] = []
        first = 0
        for row in rows:
            if row.pool is None:
                continue
            if row.start == 0 or row.pool.pooling == "last":  # it begins, perhaps anew after a preemption
                sums[row.slot].zero_()
            end = first + num_pooled(row)
            sums[row.slot] += hidden[first:end].sum(0, dtype=torch.float64)
            first = end
            if row.pool.is_last:
                num_tokens = row.start + row.num_tokens if row.pool.pooling == "mean" else 1
                ids.append(row.sequence_id)
                vectors.append(sums[row.slot] / num_tokens)
        return (ids, torch.stack(vectors).float()) if ids else None
