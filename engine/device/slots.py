"""State slots: rows of device tensors that live as long as a sequence runs.

A step names slots, and only what changed since the last step is staged. What a slot holds can be rebuilt
from the sequence's history, so preemption simply drops it. The last slot belongs to nobody, and so does the
last page: padded rows use them.
"""

from collections.abc import Sequence

import torch

from engine.outputs import Row, SlotInit


class StateSlots:
    """Per-sequence state on the device, `[num_slots + 1]` rows each.

    `last_token` int64: the newest token, which the host may not know yet. `page_table` int32
    [num_slots + 1, max_pages]. Sampling parameters fp32 (top_k int32, seed int64). `output_counts` int32 and
    `prompt_mask` bool [num_slots + 1, vocab_size] exist from the first request that has a penalty.
    """

    def __init__(
        self, num_slots: int, *, max_pages: int, dummy_page: int, vocab_size: int, device: torch.device
    ) -> None:
        rows = num_slots + 1
        self.nobody = num_slots
        self._vocab_size = vocab_size
        self._device = device
        self._num_pages = [0] * rows
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.page_table = torch.full((rows, max_pages), dummy_page, dtype=torch.int32, device=device)
        self.temperature = torch.zeros(rows, device=device)
        self.top_p = torch.ones(rows, device=device)
        self.min_p = torch.zeros(rows, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int32, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.presence = torch.zeros(rows, device=device)
        self.frequency = torch.zeros(rows, device=device)
        self.repetition = torch.ones(rows, device=device)
        self.output_counts: torch.Tensor | None = None
        self.prompt_mask: torch.Tensor | None = None
        self.inits: dict[int, SlotInit] = {}

    def start(self, rows: Sequence[Row]) -> None:
        """Set up the slots of sequences that take one with this step."""
        started = [(row.slot, row.init) for row in rows if row.init is not None]
        if not started:
            return
        for slot, init in started:
            self._num_pages[slot] = 0
            self.inits[slot] = init
        slots = torch.tensor([slot for slot, _ in started], device=self._device)
        params = [init.sampling for _, init in started]
        for tensor, values in (
            (self.temperature, [p.temperature for p in params]),
            (self.top_p, [p.top_p for p in params]),
            (self.min_p, [p.min_p for p in params]),
            (self.top_k, [p.top_k for p in params]),
            (self.seed, [init.seed for _, init in started]),
            (self.presence, [p.presence_penalty for p in params]),
            (self.frequency, [p.frequency_penalty for p in params]),
            (self.repetition, [p.repetition_penalty for p in params]),
        ):
            tensor[slots] = torch.tensor(values, dtype=tensor.dtype, device=self._device)
        for slot, init in started:
            if init.sampling.has_penalties:
                self._count_history(slot, init)

    def append_pages(self, rows: Sequence[Row]) -> None:
        """Append the rows' new pages to their slots' page tables."""
        table_rows: list[int] = []
        table_columns: list[int] = []
        pages: list[int] = []
        for row in rows:
            if row.new_pages:
                columns = self.claim_columns(row)
                table_rows += [row.slot] * len(columns)
                table_columns += columns
                pages += row.new_pages
        if pages:
            index = torch.tensor((table_rows, table_columns), device=self._device)
            self.page_table[index[0], index[1]] = torch.tensor(pages, dtype=torch.int32, device=self._device)

    def claim_columns(self, row: Row) -> range:
        """Where in its page table the row's new pages belong; counts them."""
        first = self._num_pages[row.slot]
        self._num_pages[row.slot] = first + len(row.new_pages)
        return range(first, first + len(row.new_pages))

    def _count_history(self, slot: int, init: SlotInit) -> None:
        if self.output_counts is None or self.prompt_mask is None:
            shape = (len(self._num_pages), self._vocab_size)
            self.output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self.prompt_mask = torch.zeros(shape, dtype=torch.bool, device=self._device)
        self.prompt_mask[slot].zero_()
        self.prompt_mask[slot, torch.tensor(init.prompt_token_ids, device=self._device)] = True
        outputs = torch.tensor(init.output_token_ids, dtype=torch.int64, device=self._device)
        self.output_counts[slot] = torch.bincount(outputs, minlength=self._vocab_size)
