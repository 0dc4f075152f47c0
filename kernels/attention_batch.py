"""What attention needs to know about a step."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch

T = TypeVar("T")


@dataclass(eq=False)
class AttentionBatch:
    """Where the queries of a step stand and where their keys and values lie: built once, used by all layers.

    A row is the part of a step that belongs to one sequence. Rows with exactly one query, the decode rows,
    stand first. The host copies of the lengths are None when the step is captured in a CUDA graph, where
    only the tensors change between replays. Every row is a decode row then or, if `num_rows` is there, what
    its length says.
    """

    page_table: torch.Tensor  # [num_rows, max_pages] int32; entries past a row's context are ignored
    query_start: torch.Tensor  # [num_rows + 1] int32: index of each row's first token
    context_lens: torch.Tensor  # [num_rows] int32: keys of each row, those of this step included
    slot_mapping: torch.Tensor  # [num_tokens] int64: page * page_size + offset of this step's keys
    num_decode_rows: int  # beside num_rows: the most there may be
    query_lens: list[int] | None = None
    context_lens_host: list[int] | None = None
    num_rows: torch.Tensor | None = None  # [1] int32: how many rows there are, if only the device knows
    _once: dict[Hashable, object] = field(default_factory=dict, init=False, repr=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` made at the first call with this key: work that a step's layers share."""
        value = self._once.get(key)
        if value is None:
            value = self._once[key] = make()
        return cast(T, value)

    def host_lens(self) -> tuple[list[int], list[int]]:
        """Return (query_lens, context_lens) as lists, read from the device where the caller gave none."""
        if self.query_lens is None or self.context_lens_host is None:
            self.query_lens = self.query_start.diff().tolist()
            self.context_lens_host = self.context_lens.tolist()
        return self.query_lens, self.context_lens_host
