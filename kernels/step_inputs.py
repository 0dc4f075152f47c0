"""Writes what a step reads (token ids, positions, page tables) from a few numbers for each row.

`step_inputs` for any rows: one kernel in place of 40. `decode_inputs` for steps of decode rows alone, which
are described by three numbers each. A launch costs the host 5 to 10 µs, and several times that beside a busy
event loop.
"""

from typing import NamedTuple

import numpy as np
import torch

from kernels.cpu import step_inputs as cpu
from kernels.dispatch import dispatch, tl, triton

# Columns of a row's record. Offsets count from 0: of positions, of tokens of the step, of host token ids, of
# columns of a page table, of new pages, of logits positions.
(
    SLOT,
    START,  # position of its first token
    FIRST_TOKEN,
    FIRST_HOST_TOKEN,  # its first host token id; negative: its one token is the slot's last one
    NUM_TOKENS,
    FIRST_COLUMN,  # where its new pages enter the slot's page table
    NUM_NEW_PAGES,
    FIRST_NEW_PAGE,
    NUM_LOGITS,  # number of its last tokens whose logits are sampled
    FIRST_LOGITS,
) = range(10)
NUM_COLUMNS = 10
_SLOT, _START, _FIRST_TOKEN, _FIRST_HOST = map(tl.constexpr, (SLOT, START, FIRST_TOKEN, FIRST_HOST_TOKEN))
_NUM_TOKENS, _FIRST_COLUMN = map(tl.constexpr, (NUM_TOKENS, FIRST_COLUMN))
_NUM_NEW_PAGES, _FIRST_NEW_PAGE = map(tl.constexpr, (NUM_NEW_PAGES, FIRST_NEW_PAGE))
_NUM_LOGITS, _FIRST_LOGITS = map(tl.constexpr, (NUM_LOGITS, FIRST_LOGITS))

_BLOCK = 1024


class StepInputs(NamedTuple):
    """Tensors that a step is written to; they may have room for more than it has.

    Per token, int64: `token_ids`, `positions`, and `slot_mapping` [groups, tokens], page * page_size + offset
    of its keys in each KV group. Per row, int32: `context_lens`; `query_start`, with room for one more;
    `page_table` [groups, rows, pages]; `num_rows` [1]; and int64 `row_slots`. Per logits position, int64:
    `logits_indices`, its token's index in the step, and `logits_slots` and `logits_positions`, slot and
    position of that token.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    context_lens: torch.Tensor
    query_start: torch.Tensor
    page_table: torch.Tensor
    num_rows: torch.Tensor
    row_slots: torch.Tensor
    logits_indices: torch.Tensor
    logits_slots: torch.Tensor
    logits_positions: torch.Tensor

    @classmethod
    def empty(
        cls,
        num_tokens: int,
        num_rows: int,
        num_pages: int,
        num_logits: int,
        device: torch.device,
        num_groups: int = 1,
    ) -> "StepInputs":
        """Allocate them uninitialized."""
        sizes = [num_tokens, num_tokens, num_groups * num_tokens, num_rows, *[num_logits] * 3]
        token_ids, positions, slot_mapping, row_slots, *of_logits = torch.empty(
            sum(sizes), dtype=torch.int64, device=device
        ).split(sizes)
        sizes = [num_rows, num_rows + 1, num_groups * num_rows * num_pages, 1]
        context_lens, query_start, pages, count = torch.empty(
            sum(sizes), dtype=torch.int32, device=device
        ).split(sizes)
        slot_mapping = slot_mapping.view(num_groups, num_tokens)
        page_table = pages.view(num_groups, num_rows, num_pages)
        return cls(
            token_ids,
            positions,
            slot_mapping,
            context_lens,
            query_start,
            page_table,
            count,
            row_slots,
            *of_logits,
        )

    def with_room_for(self, num_tokens: int) -> "StepInputs":
        """Return views of the same tensors with room for only `num_tokens` tokens."""
        return self._replace(
            token_ids=self.token_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            slot_mapping=self.slot_mapping[:, :num_tokens],
        )


# Not specialized on values that change every step, which would recompile.
@triton.jit(
    do_not_specialize=[
        "new_pages_stride", "slot_mapping_stride", "group_stride", "page_table_stride", "num_tokens",
        "num_logits", "token_room", "row_room", "logits_room",
    ],
    do_not_specialize_on_alignment=[
        "rows_ptr", "host_token_ids_ptr", "new_pages_ptr", "token_ids_ptr", "positions_ptr",
        "slot_mapping_ptr", "context_lens_ptr", "query_start_ptr", "page_table_ptr", "num_rows_ptr",
        "row_slots_ptr", "logits_indices_ptr", "logits_slots_ptr", "logits_positions_ptr",
    ],
)  # fmt: skip
def _step_inputs_kernel(
    rows_ptr,
    host_token_ids_ptr,
    new_pages_ptr,
    last_token_ptr,
    slot_tables_ptr,
    token_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    context_lens_ptr,
    query_start_ptr,
    page_table_ptr,
    num_rows_ptr,
    row_slots_ptr,
    logits_indices_ptr,
    logits_slots_ptr,
    logits_positions_ptr,
    slot_tables_group_stride,
    slot_tables_stride,
    new_pages_stride,
    slot_mapping_stride,
    group_stride,
    page_table_stride,
    num_tokens,
    num_logits,
    token_room,
    row_room,
    logits_room,
    padding_slot,
    NUM_GROUPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row, and one for the padding after all rows."""
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0) - 1
    lane = tl.arange(0, BLOCK)
    if row == num_rows:
        tl.store(num_rows_ptr, num_rows)
        for first in range(num_rows, row_room + 1, BLOCK):
            tl.store(query_start_ptr + first + lane, num_tokens, mask=first + lane <= row_room)
        for first in range(num_rows, row_room, BLOCK):
            tl.store(row_slots_ptr + first + lane, padding_slot, mask=first + lane < row_room)
        for group in tl.static_range(NUM_GROUPS):
            table = slot_tables_ptr + group * slot_tables_group_stride + padding_slot * slot_tables_stride
            kv_slot = tl.load(table).to(tl.int64) * PAGE_SIZE
            target = slot_mapping_ptr + group * slot_mapping_stride
            for first in range(num_tokens, token_room, BLOCK):
                tl.store(target + first + lane, kv_slot, mask=first + lane < token_room)
        for first in range(num_logits, logits_room, BLOCK):
            there = first + lane < logits_room
            tl.store(logits_indices_ptr + first + lane, 0, mask=there)
            tl.store(logits_slots_ptr + first + lane, padding_slot, mask=there)
            tl.store(logits_positions_ptr + first + lane, 0, mask=there)
        return

    slot = tl.load(rows_ptr + _SLOT * num_rows + row)
    start = tl.load(rows_ptr + _START * num_rows + row)
    length = tl.load(rows_ptr + _NUM_TOKENS * num_rows + row)
    first_token = tl.load(rows_ptr + _FIRST_TOKEN * num_rows + row)
    first_host = tl.load(rows_ptr + _FIRST_HOST * num_rows + row)
    first_column = tl.load(rows_ptr + _FIRST_COLUMN * num_rows + row)
    end_column = first_column + tl.load(rows_ptr + _NUM_NEW_PAGES * num_rows + row)
    new_pages = new_pages_ptr + tl.load(rows_ptr + _FIRST_NEW_PAGE * num_rows + row) - first_column
    row_logits = tl.load(rows_ptr + _NUM_LOGITS * num_rows + row)
    first_logits = tl.load(rows_ptr + _FIRST_LOGITS * num_rows + row)
    context_len = start + length
    tl.store(query_start_ptr + row, first_token.to(tl.int32))
    tl.store(context_lens_ptr + row, context_len.to(tl.int32))
    tl.store(row_slots_ptr + row, slot)
    for first in range(0, row_logits, BLOCK):
        there = first + lane < row_logits
        index = length - row_logits + first + lane
        tl.store(logits_indices_ptr + first_logits + first + lane, first_token + index, mask=there)
        tl.store(logits_slots_ptr + first_logits + first + lane, slot, mask=there)
        tl.store(logits_positions_ptr + first_logits + first + lane, start + index, mask=there)

    # Old pages are read where no new ones are written, so nothing waits for a store.
    num_columns = tl.cdiv(context_len, PAGE_SIZE)
    for group in tl.static_range(NUM_GROUPS):
        table = slot_tables_ptr + group * slot_tables_group_stride + slot * slot_tables_stride
        row_table = page_table_ptr + group * group_stride + row * page_table_stride
        group_pages = new_pages + group * new_pages_stride
        for first in range(0, tl.maximum(num_columns, end_column), BLOCK):
            column = first + lane
            is_new = (column >= first_column) & (column < end_column)
            page = tl.load(group_pages + column, mask=is_new, other=0).to(tl.int32)
            old = tl.load(table + column, mask=(column < num_columns) & ~is_new, other=0)
            page = tl.where(is_new, page, old)
            tl.store(row_table + column, page, mask=column < num_columns)
            tl.store(table + column, page, mask=is_new)

    last_token = tl.load(last_token_ptr + slot)
    for first in range(0, length, BLOCK):
        index = first + lane
        there = index < length
        position = start + index
        column = position // PAGE_SIZE
        is_new = (column >= first_column) & (column < end_column)
        for group in tl.static_range(NUM_GROUPS):
            table = slot_tables_ptr + group * slot_tables_group_stride + slot * slot_tables_stride
            page = tl.load(new_pages + group * new_pages_stride + column, mask=there & is_new, other=0)
            page += tl.load(table + column, mask=there & ~is_new, other=0)
            kv_slot = page * PAGE_SIZE + position % PAGE_SIZE
            target = slot_mapping_ptr + group * slot_mapping_stride + first_token
            tl.store(target + index, kv_slot, mask=there)
        place = first_host + index
        token_id = tl.load(host_token_ids_ptr + place, mask=there & (place >= 0), other=0)
        token_id = tl.where(place < 0, last_token, token_id)
        tl.store(token_ids_ptr + first_token + index, token_id, mask=there)
        tl.store(positions_ptr + first_token + index, position, mask=there)


def step_inputs_triton(
    rows: torch.Tensor,
    host_token_ids: torch.Tensor,
    new_pages: torch.Tensor,
    last_token: torch.Tensor,
    slot_tables: torch.Tensor,
    inputs: StepInputs,
    *,
    num_tokens: int,
    num_logits: int,
    page_size: int,
    padding_slot: int,
) -> None:
    assert rows.is_contiguous() and new_pages.is_contiguous()
    assert slot_tables.stride(2) == inputs.page_table.stride(2) == inputs.slot_mapping.stride(1) == 1
    _step_inputs_kernel[(rows.shape[1] + 1,)](
        rows,
        host_token_ids,
        new_pages,
        last_token,
        slot_tables,
        *inputs,
        slot_tables.stride(0),
        slot_tables.stride(1),
        new_pages.stride(0),
        inputs.slot_mapping.stride(0),
        inputs.page_table.stride(0),
        inputs.page_table.stride(1),
        num_tokens,
        num_logits,
        inputs.token_ids.shape[0],
        inputs.context_lens.shape[0],
        inputs.logits_indices.shape[0],
        padding_slot,
        NUM_GROUPS=slot_tables.shape[0],
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def step_inputs_torch(
    rows: torch.Tensor,
    host_token_ids: torch.Tensor,
    new_pages: torch.Tensor,
    last_token: torch.Tensor,
    slot_tables: torch.Tensor,
    inputs: StepInputs,
    *,
    num_tokens: int,
    num_logits: int,
    page_size: int,
    padding_slot: int,
) -> None:
    """Write a step to `inputs`, and its new pages to the page tables of the rows' slots.

    rows int64 [NUM_COLUMNS, num_rows]: a record per row; each row has at least one token, and its tokens
    follow those of the row before. host_token_ids int64; new_pages int64 [num_groups, num_new_pages]: page
    numbers, row after row; last_token int64 [num_slots]: each slot's last sampled token; slot_tables int32
    [num_groups, num_slots, max_pages]. Every row has its own slot.

    Where `inputs` have room for more than the num_tokens tokens, the rest of `slot_mapping` is the start of
    the first page of `padding_slot`; after the rows each `query_start` is num_tokens and the slot
    `padding_slot`; after the num_logits
    logits positions come some of `padding_slot`, with token and position 0. Of a row of `page_table` only the
    pages of its context are sure to be written.
    """
    # In numpy, on the tensors' own memory: for so few numbers a call into torch takes several times as long.
    (
        token_ids,
        positions,
        slot_mapping,
        context_lens,
        query_start,
        page_table,
        count,
        row_slots,
        *of_logits,
    ) = (tensor.numpy() for tensor in inputs)
    slots, starts, first_tokens, first_host, lengths, first_columns, new_counts, first_new, logits, _ = (
        rows.numpy()
    )
    tables, num_rows = slot_tables.numpy(), len(slots)
    ends = starts + lengths
    if new_pages.shape[1]:
        row = np.repeat(np.arange(num_rows), new_counts)  # of each new page
        columns = (first_columns - first_new)[row] + np.arange(new_pages.shape[1])
        tables[:, slots[row], columns] = new_pages.numpy()
    page_table[:, :num_rows] = tables[:, slots, : page_table.shape[2]]
    context_lens[:num_rows] = ends
    query_start[:num_rows] = first_tokens
    query_start[num_rows:] = num_tokens
    count[0] = num_rows
    row_slots[:num_rows] = slots
    row_slots[num_rows:] = padding_slot

    row, place = np.repeat(np.arange(num_rows), lengths), np.arange(num_tokens)  # of each token
    position = (starts - first_tokens)[row] + place
    column, offset = np.divmod(position, page_size)
    positions[:num_tokens] = position
    slot_mapping[:, :num_tokens] = tables[:, slots[row], column].astype(np.int64) * page_size + offset
    slot_mapping[:, num_tokens:] = tables[:, padding_slot, :1].astype(np.int64) * page_size
    is_on_host = first_host >= 0
    token_ids[first_tokens[~is_on_host]] = last_token.numpy()[slots[~is_on_host]]
    place = place[is_on_host[row]]
    token_ids[place] = host_token_ids.numpy()[(first_host - first_tokens)[row[place]] + place]

    row = np.repeat(np.arange(num_rows), logits)  # of each logits position
    index = np.arange(num_logits) - (logits.cumsum() - lengths - first_tokens)[row]
    values = index, slots[row], (starts - first_tokens)[row] + index
    for target, value, padding in zip(of_logits, values, (0, padding_slot, 0), strict=True):
        target[:num_logits] = value
        target[num_logits:] = padding


step_inputs = dispatch(step_inputs_triton, step_inputs_torch, cpu.step_inputs)


class DecodeInputs(NamedTuple):
    """`token_ids` int64 [num_rows], `slot_mapping` int64 [num_groups, num_rows], `context_lens` int32
    [num_rows], `page_table` int32 [num_groups, num_rows, max_pages], of which only the pages of a row's
    context are written.
    """

    token_ids: torch.Tensor
    slot_mapping: torch.Tensor
    context_lens: torch.Tensor
    page_table: torch.Tensor


@triton.jit
def _decode_inputs_kernel(
    staging_ptr,
    last_token_ptr,
    slot_tables_ptr,
    token_ids_ptr,
    slot_mapping_ptr,
    context_lens_ptr,
    page_table_ptr,
    staging_stride,
    slot_tables_group_stride,
    slot_tables_stride,
    max_pages,
    NUM_GROUPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(staging_ptr + row)
    position = tl.load(staging_ptr + staging_stride + row)
    column = position // PAGE_SIZE
    tl.store(token_ids_ptr + row, tl.load(last_token_ptr + slot))
    tl.store(context_lens_ptr + row, (position + 1).to(tl.int32))
    num_rows = tl.num_programs(0)
    for group in tl.static_range(NUM_GROUPS):
        page = tl.load(staging_ptr + (2 + group) * staging_stride + row).to(tl.int32)
        table = slot_tables_ptr + group * slot_tables_group_stride + slot * slot_tables_stride
        if page < 0:
            page = tl.load(table + column)
        place = group * num_rows + row
        tl.store(slot_mapping_ptr + place, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE)
        for start in range(0, column + 1, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            pages = tl.load(table + columns, mask=columns < column, other=0)
            pages = tl.where(columns == column, page, pages)
            tl.store(page_table_ptr + place * max_pages + columns, pages, mask=columns <= column)
        tl.store(table + column, page)


def decode_inputs_triton(
    staging: torch.Tensor, last_token: torch.Tensor, slot_tables: torch.Tensor, page_size: int
) -> DecodeInputs:
    num_rows, (num_groups, _, max_pages) = staging.shape[1], slot_tables.shape
    assert staging.stride(1) == slot_tables.stride(2) == 1
    inputs = DecodeInputs(
        token_ids=torch.empty(num_rows, dtype=torch.int64, device=staging.device),
        slot_mapping=torch.empty(num_groups, num_rows, dtype=torch.int64, device=staging.device),
        context_lens=torch.empty(num_rows, dtype=torch.int32, device=staging.device),
        page_table=torch.empty(num_groups, num_rows, max_pages, dtype=torch.int32, device=staging.device),
    )
    if num_rows:
        _decode_inputs_kernel[(num_rows,)](
            staging,
            last_token,
            slot_tables,
            *inputs,
            staging.stride(0),
            slot_tables.stride(0),
            slot_tables.stride(1),
            max_pages,
            NUM_GROUPS=num_groups,
            PAGE_SIZE=page_size,
            BLOCK=_BLOCK,
            num_warps=1,
        )
    return inputs


def decode_inputs_torch(
    staging: torch.Tensor, last_token: torch.Tensor, slot_tables: torch.Tensor, page_size: int
) -> DecodeInputs:
    """Return the inputs of decode rows, and write their new pages to `slot_tables`.

    staging int64 [2 + num_groups, num_rows]: slot, position of its last token, and for each KV group the page
    for that position if it is the first of a page, else negative. last_token int64 [num_slots]: each slot's
    last sampled token; slot_tables int32 [num_groups, num_slots, max_pages]. Every row but padding has a slot
    of its own.
    """
    (slots, positions), new_pages = staging[:2], staging[2:]
    columns = positions // page_size
    pages = torch.where(new_pages >= 0, new_pages.to(torch.int32), slot_tables[:, slots, columns])
    slot_tables[:, slots, columns] = pages
    return DecodeInputs(
        token_ids=last_token[slots],
        slot_mapping=pages.to(torch.int64) * page_size + positions % page_size,
        context_lens=(positions + 1).to(torch.int32),
        page_table=slot_tables[:, slots],
    )


decode_inputs = dispatch(decode_inputs_triton, decode_inputs_torch)
