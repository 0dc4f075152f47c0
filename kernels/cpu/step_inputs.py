"""Inputs of a step on a CPU; `kernels/step_inputs.py` says what they are.

In a step, which empties the caches of a core, one row takes 16 µs; in numpy it takes 104.
"""

import numpy as np
from torch import Tensor

from kernels.cpu.compiler import compiled, int32s, int64s


@compiled()
def _step_inputs_kernel(
    rows_ptr,
    num_rows,
    host_token_ids_ptr,
    new_pages_ptr,
    num_new_pages,
    last_token_ptr,
    tables_ptr,
    num_groups,
    num_slots,
    max_pages,
    token_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    token_room,
    context_lens_ptr,
    query_start_ptr,
    row_room,
    page_table_ptr,
    num_columns,
    count_ptr,
    row_slots_ptr,
    logits_indices_ptr,
    logits_slots_ptr,
    logits_positions_ptr,
    logits_room,
    num_tokens,
    num_logits,
    page_size,
    padding_slot,
):
    """Tensors are contiguous; of `slot_mapping` and `page_table` there may be more room between groups."""
    rows = int64s(rows_ptr, 10, num_rows)
    host_token_ids = int64s(host_token_ids_ptr, 1, num_tokens)[0]
    new_pages = int64s(new_pages_ptr, num_groups, num_new_pages)
    last_token = int64s(last_token_ptr, 1, num_slots)[0]
    tables = int32s(tables_ptr, num_groups * num_slots, max_pages)
    token_ids = int64s(token_ids_ptr, 1, num_tokens)[0]
    positions = int64s(positions_ptr, 1, num_tokens)[0]
    slot_mapping = int64s(slot_mapping_ptr, num_groups, token_room)
    context_lens = int32s(context_lens_ptr, 1, row_room)[0]
    query_start = int32s(query_start_ptr, 1, row_room + 1)[0]
    page_table = int32s(page_table_ptr, num_groups * row_room, num_columns)
    row_slots = int64s(row_slots_ptr, 1, row_room)[0]
    logits_indices = int64s(logits_indices_ptr, 1, logits_room)[0]
    logits_slots = int64s(logits_slots_ptr, 1, logits_room)[0]
    logits_positions = int64s(logits_positions_ptr, 1, logits_room)[0]

    int32s(count_ptr, 1, 1)[0, 0] = num_rows
    logit = 0
    for row in range(num_rows):
        slot, start, first_token, first_host, length = rows[:5, row]
        first_column, new_count, first_new, logits = rows[5:9, row]
        end = start + length
        context_lens[row], query_start[row], row_slots[row] = end, first_token, slot
        for group in range(num_groups):
            table = tables[group * num_slots + slot]
            for i in range(new_count):
                table[first_column + i] = new_pages[group, first_new + i]
            for column in range(min(num_columns, (end + page_size - 1) // page_size)):
                page_table[group * row_room + row, column] = table[column]
            for i in range(length):
                position = start + i
                page = np.int64(table[position // page_size])
                slot_mapping[group, first_token + i] = page * page_size + position % page_size
        for i in range(length):
            positions[first_token + i] = start + i
            token_ids[first_token + i] = (
                host_token_ids[first_host + i] if first_host >= 0 else last_token[slot]
            )
        for i in range(length - logits, length):
            logits_indices[logit], logits_slots[logit] = first_token + i, slot
            logits_positions[logit] = start + i
            logit += 1
    for row in range(num_rows, row_room + 1):
        query_start[row] = num_tokens
        if row < row_room:
            row_slots[row] = padding_slot
    for group in range(num_groups):
        padding = np.int64(tables[group * num_slots + padding_slot, 0]) * page_size
        for i in range(num_tokens, token_room):
            slot_mapping[group, i] = padding
    for i in range(num_logits, logits_room):
        logits_indices[i] = logits_positions[i] = 0
        logits_slots[i] = padding_slot


def step_inputs(
    rows: Tensor,
    host_token_ids: Tensor,
    new_pages: Tensor,
    last_token: Tensor,
    slot_tables: Tensor,
    inputs: tuple[Tensor, ...],
    *,
    num_tokens: int,
    num_logits: int,
    page_size: int,
    padding_slot: int,
) -> None:
    """`inputs`: the fields of a StepInputs."""
    token_ids, positions, slot_mapping, context_lens, query_start, page_table, count, *rest = inputs
    row_slots, logits_indices, logits_slots, logits_positions = rest
    num_groups, num_slots, max_pages = slot_tables.shape
    assert slot_mapping.is_contiguous() and page_table.is_contiguous() and slot_tables.is_contiguous()
    assert rows.is_contiguous() and new_pages.is_contiguous()
    _step_inputs_kernel(
        rows.data_ptr(),
        rows.shape[1],
        host_token_ids.data_ptr(),
        new_pages.data_ptr(),
        new_pages.shape[1],
        last_token.data_ptr(),
        slot_tables.data_ptr(),
        num_groups,
        num_slots,
        max_pages,
        token_ids.data_ptr(),
        positions.data_ptr(),
        slot_mapping.data_ptr(),
        slot_mapping.shape[1],
        context_lens.data_ptr(),
        query_start.data_ptr(),
        context_lens.shape[0],
        page_table.data_ptr(),
        page_table.shape[2],
        count.data_ptr(),
        row_slots.data_ptr(),
        logits_indices.data_ptr(),
        logits_slots.data_ptr(),
        logits_positions.data_ptr(),
        logits_indices.shape[0],
        num_tokens,
        num_logits,
        page_size,
        padding_slot,
    )
