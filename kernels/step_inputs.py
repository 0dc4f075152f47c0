"""What a step of decode rows and prompts reads, from a few numbers for each row: one kernel in place of 40.

A launch costs the host 5 to 10 µs, and several times that beside a busy event loop.
"""

from typing import NamedTuple

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
    `num_rows` [1]. Of rows that are sampled, int64: `last_tokens`, the places in the step of their last
    tokens, and slot and position of these.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    context_lens: torch.Tensor
    query_start: torch.Tensor
    page_table: torch.Tensor
    num_rows: torch.Tensor
    last_tokens: torch.Tensor
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
        "context_lens_ptr", "query_start_ptr", "page_table_ptr", "num_rows_ptr", "last_tokens_ptr",
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
    last_tokens_ptr,
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
            tl.store(last_tokens_ptr + first + lane, 0, mask=there)
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
        tl.store(last_tokens_ptr + sampled, first_token + length - 1)
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
        inputs.last_tokens.shape[0],
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
    num_rows, num_new = rows.shape[1], len(new_pages)
    slots, starts, first_tokens, _, lengths, first_columns, new_counts, first_new, sampled = rows.unbind()
    if num_new:
        owners = torch.repeat_interleave(new_counts, output_size=num_new)
        columns = (first_columns - first_new).index_select(0, owners)
        columns += torch.arange(num_new, device=rows.device)
        slot_tables[slots.index_select(0, owners), columns] = new_pages.to(torch.int32)
    inputs.page_table[:num_rows] = slot_tables[:, : inputs.page_table.shape[1]].index_select(0, slots)
    torch.add(starts, lengths, out=inputs.context_lens[:num_rows])
    inputs.query_start[:num_rows] = first_tokens
    inputs.query_start[num_rows:] = num_tokens
    inputs.num_rows.fill_(num_rows)

    token_ids, positions, slot_mapping = (tensor[:num_tokens] for tensor in inputs[:3])
    if len(known):
        each = rows[:4].index_select(1, torch.repeat_interleave(lengths, output_size=num_tokens))
        slots_of, starts_of, firsts_of, known_of = each.unbind()
        index = torch.arange(num_tokens, device=rows.device).sub_(firsts_of)
        torch.add(starts_of, index, out=positions)
        known_tokens = known.index_select(0, index.add_(known_of).clamp_(min=0))
        torch.where(known_of < 0, newest.index_select(0, slots_of), known_tokens, out=token_ids)
    else:  # each row has one token
        slots_of = slots
        positions.copy_(starts)
        torch.index_select(newest, 0, slots, out=token_ids)
    pages = slot_tables[slots_of, positions // page_size]
    torch.add(positions % page_size, pages, alpha=page_size, out=slot_mapping)
    if num_tokens < len(inputs.slot_mapping):
        inputs.slot_mapping[num_tokens:] = dummy_slot

    if num_sampled < num_rows:
        rows = rows[:, sampled >= 0]
        slots, starts, first_tokens, _, lengths, *_ = rows.unbind()
    torch.add(first_tokens, lengths, out=inputs.last_tokens[:num_sampled]).sub_(1)
    inputs.sampled_slots[:num_sampled] = slots
    torch.add(starts, lengths, out=inputs.sampled_positions[:num_sampled]).sub_(1)
    if num_sampled < len(inputs.last_tokens):
        inputs.last_tokens[num_sampled:] = 0
        inputs.sampled_slots[num_sampled:] = nobody
        inputs.sampled_positions[num_sampled:] = 0


step_inputs = dispatch(step_inputs_triton, step_inputs_torch)
