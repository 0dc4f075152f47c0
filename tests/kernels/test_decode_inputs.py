import pytest
import torch

from kernels.step_inputs import decode_inputs
from tests.kernels.conftest import Target

NO_PAGE = -1
OFFSET = 20_000


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_get_their_slots_state(target: Target, page_size: int, num_groups: int):
    num_slots, max_pages = 7, 1500
    newest = torch.randint(0, 100, (num_slots,))
    tables = torch.randint(0, 10_000, (num_slots, max_pages), dtype=torch.int32)
    slots = [4, 0, 6, 2]
    positions = [0, page_size * 3, page_size * 1200, page_size * 2 - 1]
    new_pages = [77, 88, 99, NO_PAGE]
    others = [page if page == NO_PAGE else page + OFFSET for page in new_pages]  # of the second KV group
    staging = torch.tensor([slots, positions, new_pages, others][: 2 + num_groups])
    both = torch.stack((tables, tables + OFFSET))[:num_groups]
    staging, result_tables = target.to(staging, both)
    inputs = decode_inputs(staging, *target.to(newest), result_tables, page_size)
    expected_tables = tables.clone()
    for row, (slot, position, page) in enumerate(zip(slots, positions, new_pages, strict=True)):
        column = position // page_size
        if page != NO_PAGE:
            expected_tables[slot, column] = page
        assert inputs.token_ids[row] == newest[slot]
        assert inputs.context_lens[row] == position + 1
        page = int(expected_tables[slot, column])
        for group in range(num_groups):
            kv_slot = (page + group * OFFSET) * page_size + position % page_size
            assert inputs.slot_mapping[group, row] == kv_slot
            got = inputs.page_table[group, row, : column + 1].cpu()
            assert torch.equal(got, expected_tables[slot, : column + 1] + group * OFFSET), f"row {row}"
    expected = torch.stack((expected_tables, expected_tables + OFFSET))[:num_groups]
    assert torch.equal(result_tables.cpu(), expected)
