"""What a decode step reads from the state slots: one kernel in place of a dozen small ones."""

from typing import NamedTuple

import torch

from kernels.dispatch import dispatch, tl, triton

_BLOCK = 1024


class DecodeInputs(NamedTuple):
    """`token_ids` and `slot_mapping` int64 [num_rows], `context_lens` int32 [num_rows], `page_table` int32
    [num_rows, max_pages], of which only the pages of a row's context are written.
    """

    token_ids: torch.Tensor
    slot_mapping: torch.Tensor
    context_lens: torch.Tensor
    page_table: torch.Tensor


@triton.jit
def _decode_inputs_kernel(
    staging_ptr,
    newest_ptr,
    slot_tables_ptr,
    token_ids_ptr,
    slot_mapping_ptr,
    context_lens_ptr,
    page_table_ptr,
    staging_stride,
    slot_tables_stride,
    max_pages,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(staging_ptr + row)
    position = tl.load(staging_ptr + staging_stride + row)
    new_page = tl.load(staging_ptr + 2 * staging_stride + row).to(tl.int32)
    column = position // PAGE_SIZE
    table = slot_tables_ptr + slot * slot_tables_stride
    page = new_page
    if new_page < 0:
        page = tl.load(table + column)
    tl.store(token_ids_ptr + row, tl.load(newest_ptr + slot))
    tl.store(slot_mapping_ptr + row, page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE)
    tl.store(context_lens_ptr + row, (position + 1).to(tl.int32))
    for start in range(0, column + 1, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        pages = tl.load(table + columns, mask=columns < column, other=0)
        pages = tl.where(columns == column, page, pages)
        tl.store(page_table_ptr + row * max_pages + columns, pages, mask=columns <= column)
    tl.store(table + column, page)


def decode_inputs_triton(
    staging: torch.Tensor, newest: torch.Tensor, slot_tables: torch.Tensor, page_size: int
) -> DecodeInputs:
    num_rows, max_pages = staging.shape[1], slot_tables.shape[1]
    assert staging.stride(1) == slot_tables.stride(1) == 1
    inputs = DecodeInputs(
        token_ids=torch.empty(num_rows, dtype=torch.int64, device=staging.device),
        slot_mapping=torch.empty(num_rows, dtype=torch.int64, device=staging.device),
        context_lens=torch.empty(num_rows, dtype=torch.int32, device=staging.device),
        page_table=torch.empty(num_rows, max_pages, dtype=torch.int32, device=staging.device),
    )
    if num_rows:
        _decode_inputs_kernel[(num_rows,)](
            staging,
            newest,
            slot_tables,
            *inputs,
            staging.stride(0),
            slot_tables.stride(0),
            max_pages,
            PAGE_SIZE=page_size,
            BLOCK=_BLOCK,
            num_warps=1,
        )
    return inputs


def decode_inputs_torch(
    staging: torch.Tensor, newest: torch.Tensor, slot_tables: torch.Tensor, page_size: int
) -> DecodeInputs:
    """Return the inputs of rows that continue decoding; enters their new pages in `slot_tables`.

    staging int64 [3, num_rows]: slot, position of the newest token, and the page for that position if it is
    the first of a page, else negative. newest int64 [num_slots] holds each slot's newest token; slot_tables
    int32 [num_slots, max_pages]. No slot may stand in two rows, but for one whose contents nobody reads.
    """
    slots, positions, new_pages = staging
    columns = positions // page_size
    pages = torch.where(new_pages >= 0, new_pages.to(torch.int32), slot_tables[slots, columns])
    slot_tables[slots, columns] = pages
    return DecodeInputs(
        token_ids=newest[slots],
        slot_mapping=pages.to(torch.int64) * page_size + positions % page_size,
        context_lens=(positions + 1).to(torch.int32),
        page_table=slot_tables[slots],
    )


decode_inputs = dispatch(decode_inputs_triton, decode_inputs_torch)
