"""The arguments that all attention kernels share: the rows of a step, and the options of a layer."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, cast

import torch

T = TypeVar("T")


class AttentionOptions(NamedTuple):
    """What a layer's attention computes: scores are `scale * q·k`, with scale > 0.

    window w > 0: a query sees the last w keys, its own included. softcap c > 0: scores are bounded to
    `c * tanh(score / c)`. sinks fp32 [num_heads]: a logit per query head that joins the softmax of its scores
    and has no value (gpt-oss, OpenAI, 2025).
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


@dataclass(eq=False)
class AttentionBatch:
    """Positions of a step's queries and the pages of their keys and values: built once, used by all layers.

    A row is the part of a step that belongs to one sequence. Rows with exactly one query, the decode rows,
    come first. The host copies of the lengths are None when the step is captured in a CUDA graph, where
    only the tensors change between replays. All rows are decode rows then, unless `num_rows` is given: the
    lengths on the device decide in that case.
    """

    page_table: torch.Tensor  # [num_rows, max_pages] int32; entries past a row's context are ignored
    query_start: torch.Tensor  # [num_rows + 1] int32: index of each row's first token
    context_lens: torch.Tensor  # [num_rows] int32: keys of each row, those of this step included
    slot_mapping: torch.Tensor  # [num_tokens] int64: page * page_size + offset of this step's keys
    num_decode_rows: int  # with num_rows: an upper bound
    query_lens: list[int] | None = None
    context_lens_host: list[int] | None = None
    num_rows: torch.Tensor | None = None  # [1] int32: the number of rows, if only the device knows it
    _once: dict[Hashable, object] = field(default_factory=dict, init=False, repr=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned at the first call with this key: work that a step's layers share."""
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
