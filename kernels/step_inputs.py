"""What a step of decode rows and prompts reads, from a few numbers for each row: one kernel in place of 40.

A launch costs the host 5 to 10 µs, and several times that beside a busy event loop.
"""

from typing import NamedTuple

import numpy as np
import torch

from kernels.dispatch import dispatch, tl, triton

# What is told of each row. All but the slot are numbers from 0: of positions, of tokens of the step, of known
# tokens, of columns of a page table, of new pages, of sampled rows.
(
    SLOT,
    START,  # position of its first token
    FIRST_TOKEN,
    FIRST_KNOWN,  # its first known token; negative: its one token is the slot's newest
    NUM_TOKENS,
    FIRST_COLUMN,  # where its new pages enter the slot's page table
    NUM_NEW_PAGES,
    FIRST_NEW_PAGE,
    SAMPLED,  # which of the sampled rows it is, in their order; negative: none
) = range(9)
NUM_COLUMNS = 9
_SLOT, _START, _FIRST_TOKEN, _FIRST_KNOWN = map(tl.constexpr, (SLOT, START, FIRST_TOKEN, FIRST_KNOWN))
_NUM_TOKENS, _FIRST_COLUMN, _SAMPLED = map(tl.constexpr, (NUM_TOKENS, FIRST_COLUMN, SAMPLED))
_NUM_NEW_PAGES, _FIRST_NEW_PAGE = map(tl.constexpr, (NUM_NEW_PAGES, FIRST_NEW_PAGE))

_BLOCK = 1024


class StepInputs(NamedTuple):
    """Tensors that a step is written to; they may have room for more than it has.

    Of tokens, int64: `token_ids`, `positions`, and `slot_mapping`, page * page_size + offset of their keys.
    Of rows, int32: `context_lens`; `query_start`, with room for one more; `page_table` [rows, pages];
    `num_rows` [1]. Of rows that are sampled, int64: `logits_indices`, the places in the step of their last
    tokens, and slot and position of these.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    context_lens: torch.Tensor
    query_start: torch.Tensor
    page_table: torch.Tensor
    num_rows: torch.Tensor
    logits_indices: torch.Tensor
    sampled_slots: torch.Tensor
    sampled_positions: torch.Tensor

    @classmethod
    def empty(
        cls, num_tokens: int, num_rows: int, num_pages: int, num_sampled: int, device: torch.device
    ) -> "StepInputs":
        """Room for so much, with anything in it."""
        sizes = [num_tokens] * 3 + [num_sampled] * 3
        token_ids, positions, slot_mapping, *sampled = torch.empty(
            sum(sizes), dtype=torch.int64, device=device
        ).split(sizes)
        sizes = [num_rows, num_rows + 1, num_rows * num_pages, 1]
        context_lens, query_start, pages, count = torch.empty(
            sum(sizes), dtype=torch.int32, device=device
        ).split(sizes)
        page_table = pages.view(num_rows, num_pages)
        return cls(token_ids, positions, slot_mapping, context_lens, query_start, page_table, count, *sampled)

    def with_room_for(self, num_tokens: int) -> "StepInputs":
        """The same tensors, with room for fewer tokens."""
        return self._replace(
            token_ids=self.token_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            slot_mapping=self.slot_mapping[:num_tokens],
        )


# What changes from step to step must not choose another compiled variant.
@triton.jit(
    do_not_specialize=[
        "page_table_stride", "num_tokens", "num_sampled", "token_room", "row_room", "sampled_room"
    ],
    do_not_specialize_on_alignment=[
        "rows_ptr", "known_ptr", "new_pages_ptr", "token_ids_ptr", "positions_ptr", "slot_mapping_ptr",
        "context_lens_ptr", "query_start_ptr", "page_table_ptr", "num_rows_ptr", "logits_indices_ptr",
        "sampled_slots_ptr", "sampled_positions_ptr",
    ],
)  # fmt: skip
def _step_inputs_kernel(
    rows_ptr,
    known_ptr,
    new_pages_ptr,
    newest_ptr,
    slot_tables_ptr,
    token_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    context_lens_ptr,
    query_start_ptr,
    page_table_ptr,
    num_rows_ptr,
    logits_indices_ptr,
    sampled_slots_ptr,
    sampled_positions_ptr,
    slot_tables_stride,
    page_table_stride,
    num_tokens,
    num_sampled,
    token_room,
    row_room,
    sampled_room,
    dummy_slot,
    nobody,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row, and one for what lies behind all of them."""
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0) - 1
    lane = tl.arange(0, BLOCK)
    if row == num_rows:
        tl.store(num_rows_ptr, num_rows)
        for first in range(num_rows, row_room + 1, BLOCK):
            tl.store(query_start_ptr + first + lane, num_tokens, mask=first + lane <= row_room)
        for first in range(num_tokens, token_room, BLOCK):
            tl.store(slot_mapping_ptr + first + lane, dummy_slot, mask=first + lane < token_room)
        for first in range(num_sampled, sampled_room, BLOCK):
            there = first + lane < sampled_room
            tl.store(logits_indices_ptr + first + lane, 0, mask=there)
            tl.store(sampled_slots_ptr + first + lane, nobody, mask=there)
            tl.store(sampled_positions_ptr + first + lane, 0, mask=there)
        return

    slot = tl.load(rows_ptr + _SLOT * num_rows + row)
    start = tl.load(rows_ptr + _START * num_rows + row)
    length = tl.load(rows_ptr + _NUM_TOKENS * num_rows + row)
    first_token = tl.load(rows_ptr + _FIRST_TOKEN * num_rows + row)
    first_known = tl.load(rows_ptr + _FIRST_KNOWN * num_rows + row)
    first_column = tl.load(rows_ptr + _FIRST_COLUMN * num_rows + row)
    end_column = first_column + tl.load(rows_ptr + _NUM_NEW_PAGES * num_rows + row)
    new_pages = new_pages_ptr + tl.load(rows_ptr + _FIRST_NEW_PAGE * num_rows + row) - first_column
    sampled = tl.load(rows_ptr + _SAMPLED * num_rows + row)
    context_len = start + length
    tl.store(query_start_ptr + row, first_token.to(tl.int32))
    tl.store(context_lens_ptr + row, context_len.to(tl.int32))
    if sampled >= 0:
        tl.store(logits_indices_ptr + sampled, first_token + length - 1)
        tl.store(sampled_slots_ptr + sampled, slot)
        tl.store(sampled_positions_ptr + sampled, context_len - 1)

    # Old pages are read where no new ones are written, so nothing waits for a store.
    table = slot_tables_ptr + slot * slot_tables_stride
    num_columns = tl.cdiv(context_len, PAGE_SIZE)
    for first in range(0, tl.maximum(num_columns, end_column), BLOCK):
        column = first + lane
        is_new = (column >= first_column) & (column < end_column)
        page = tl.load(new_pages + column, mask=is_new, other=0).to(tl.int32)
        old = tl.load(table + column, mask=(column < num_columns) & ~is_new, other=0)
        page = tl.where(is_new, page, old)
        tl.store(page_table_ptr + row * page_table_stride + column, page, mask=column < num_columns)
        tl.store(table + column, page, mask=is_new)

    newest = tl.load(newest_ptr + slot)
    for first in range(0, length, BLOCK):
        index = first + lane
        there = index < length
        position = start + index
        column = position // PAGE_SIZE
        is_new = (column >= first_column) & (column < end_column)
        page = tl.load(new_pages + column, mask=there & is_new, other=0)
        page += tl.load(table + column, mask=there & ~is_new, other=0)
        place = first_known + index
        known = tl.load(known_ptr + place, mask=there & (place >= 0), other=0)
        tl.store(token_ids_ptr + first_token + index, tl.where(place < 0, newest, known), mask=there)
        tl.store(positions_ptr + first_token + index, position, mask=there)
        kv_slot = page * PAGE_SIZE + position % PAGE_SIZE
        tl.store(slot_mapping_ptr + first_token + index, kv_slot, mask=there)


def step_inputs_triton(
    rows: torch.Tensor,
    known: torch.Tensor,
    new_pages: torch.Tensor,
    newest: torch.Tensor,
    slot_tables: torch.Tensor,
    inputs: StepInputs,
    *,
    num_tokens: int,
    num_sampled: int,
    page_size: int,
    dummy_slot: int,
    nobody: int,
) -> None:
    assert rows.is_contiguous() and slot_tables.stride(1) == inputs.page_table.stride(1) == 1
    _step_inputs_kernel[(rows.shape[1] + 1,)](
        rows,
        known,
        new_pages,
        newest,
        slot_tables,
        *inputs,
        slot_tables.stride(0),
        inputs.page_table.stride(0),
        num_tokens,
        num_sampled,
        inputs.token_ids.shape[0],
        inputs.context_lens.shape[0],
        inputs.logits_indices.shape[0],
        dummy_slot,
        nobody,
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def step_inputs_torch(
    rows: torch.Tensor,
    known: torch.Tensor,
    new_pages: torch.Tensor,
    newest: torch.Tensor,
    slot_tables: torch.Tensor,
    inputs: StepInputs,
    *,
    num_tokens: int,
    num_sampled: int,
    page_size: int,
    dummy_slot: int,
    nobody: int,
) -> None:
    """Write a step to `inputs`, and its new pages to the page tables of the rows' slots.

    rows int64 [NUM_COLUMNS, num_rows] are numbers above; tokens stand row after row, and each row has one at
    least. known int64: the tokens the host knows; new_pages int64: pages; newest int64 [num_slots]: each
    slot's newest token; slot_tables int32 [num_slots, max_pages]. No slot may stand in two rows.

    Where `inputs` have room for more than the num_tokens tokens, the rest of `slot_mapping` is `dummy_slot`;
    behind the rows each `query_start` is num_tokens; behind the num_sampled rows that are sampled stand rows
    of the slot `nobody`, with token and position 0. Of a row of `page_table` only the pages of its context
    are sure to be written.
    """
    # In numpy, on the tensors' own memory: for so few numbers a call into torch takes several times as long.
    token_ids, positions, slot_mapping, context_lens, query_start, page_table, count, *of_sampled = (
        tensor.numpy() for tensor in inputs
    )
    slots, starts, first_tokens, first_known, lengths, first_columns, new_counts, first_new, sampled = (
        rows.numpy()
    )
    tables, num_rows = slot_tables.numpy(), len(slots)
    ends = starts + lengths
    if len(new_pages):
        row = np.repeat(np.arange(num_rows), new_counts)  # of each new page
        columns = (first_columns - first_new)[row] + np.arange(len(new_pages))
        tables[slots[row], columns] = new_pages.numpy()
    page_table[:num_rows] = tables[slots, : page_table.shape[1]]
    context_lens[:num_rows] = ends
    query_start[:num_rows] = first_tokens
    query_start[num_rows:] = num_tokens
    count[0] = num_rows

    row, place = np.repeat(np.arange(num_rows), lengths), np.arange(num_tokens)  # of each token
    position = (starts - first_tokens)[row] + place
    column, offset = np.divmod(position, page_size)
    positions[:num_tokens] = position
    slot_mapping[:num_tokens] = tables[slots[row], column].astype(np.int64) * page_size + offset
    slot_mapping[num_tokens:] = dummy_slot
    is_known = first_known >= 0
    token_ids[first_tokens[~is_known]] = newest.numpy()[slots[~is_known]]
    place = place[is_known[row]]
    token_ids[place] = known.numpy()[(first_known - first_tokens)[row[place]] + place]

    is_sampled = sampled >= 0
    last = first_tokens + lengths - 1, slots, ends - 1
    for target, values, padding in zip(of_sampled, last, (0, nobody, 0), strict=True):
        target[:num_sampled] = values[is_sampled]
        target[num_sampled:] = padding


step_inputs = dispatch(step_inputs_triton, step_inputs_torch)
