"""Random steps, written where there is just enough room and where there is more, and what they should be."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from kernels.step_inputs import NUM_COLUMNS, StepInputs, step_inputs
from tests.kernels.conftest import Target

NUM_GROUPS = 2
GROUP_OFFSET = 20_000  # of the pages of the second KV group
NOTHING = -9  # stands wherever nothing is written


@dataclass
class Row:
    """A row as a plan has it; without tokens it has one, its slot's last one."""

    slot: int
    start: int
    tokens: list[int]
    first_column: int
    new_pages: list[int]
    num_logits: int

    @property
    def length(self) -> int:
        return len(self.tokens) or 1

    @property
    def context_len(self) -> int:
        return self.start + self.length


@dataclass
class Expected:
    """What a step should leave; tables int32 [num_slots, max_pages]."""

    tables: torch.Tensor
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slot_mapping: list[int] = field(default_factory=list)
    query_start: list[int] = field(default_factory=lambda: [0])
    logits: list[tuple[int, int, int]] = field(default_factory=list)


def expect(rows: list[Row], last_token: list[int], tables: torch.Tensor, page_size: int) -> Expected:
    """Token by token."""
    expected = Expected(tables.clone())
    for row in rows:
        end_column = row.first_column + len(row.new_pages)
        expected.tables[row.slot, row.first_column : end_column] = torch.tensor(row.new_pages)
        table = expected.tables[row.slot, : -(-row.context_len // page_size)].tolist()
        expected.token_ids += row.tokens or [last_token[row.slot]]
        for position in range(row.start, row.context_len):
            expected.positions.append(position)
            expected.slot_mapping.append(table[position // page_size] * page_size + position % page_size)
        expected.query_start.append(len(expected.positions))
        for index in range(len(expected.positions) - row.num_logits, len(expected.positions)):
            expected.logits.append((index, row.slot, expected.positions[index]))
    return expected


def columns(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The records of the rows, their tokens and pages."""
    tokens: list[int] = []
    pages: list[int] = []
    records = []
    first, num_logits = 0, 0
    for row in rows:
        place = len(tokens) if row.tokens else -1
        page_columns = (row.first_column, len(row.new_pages), len(pages))
        logits = (row.num_logits, num_logits)
        records.append((row.slot, row.start, first, place, row.length, *page_columns, *logits))
        first += row.length
        num_logits += row.num_logits
        tokens += row.tokens
        pages += row.new_pages
    assert len(records[0]) == NUM_COLUMNS
    return torch.tensor(records).T.contiguous(), *(
        torch.tensor(part, dtype=torch.int64) for part in (tokens, pages)
    )


def in_groups(pages: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Pages of every KV group, [num_groups, ...], from those of the first."""
    return torch.stack([pages + group * GROUP_OFFSET for group in range(num_groups)])


@pytest.fixture(params=[1, NUM_GROUPS], ids=["one-group", "two-groups"])
def num_groups(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def check(
    target: Target,
    rows: list[Row],
    page_size: int,
    num_slots: int,
    max_pages: int,
    room: int,
    num_groups: int,
) -> None:
    """Check a step; `room` is the number of unused tokens and rows. The last slot is for padding."""
    last_token = torch.randint(0, 100, (num_slots + 1,))
    tables = torch.randint(0, 10_000, (num_slots + 1, max_pages), dtype=torch.int32)
    padding_kv_slot = int(tables[num_slots, 0]) * page_size
    expected = expect(rows, last_token.tolist(), tables, page_size)
    num_tokens, num_logits = len(expected.positions), len(expected.logits)
    lens = [row.context_len for row in rows]
    inputs = StepInputs.empty(
        num_tokens + room,
        len(rows) + room,
        max_pages if room else -(-max(lens) // page_size),
        num_logits + room,
        target.device,
        num_groups,
    )
    for tensor in inputs:
        tensor.fill_(NOTHING)
    result_tables = in_groups(tables, num_groups).to(target.device)
    records, tokens, pages = columns(rows)
    step_inputs(
        *target.to(records, tokens, in_groups(pages, num_groups), last_token),
        result_tables,
        inputs,
        num_tokens=num_tokens,
        num_logits=num_logits,
        page_size=page_size,
        padding_slot=num_slots,
    )
    nothing = [NOTHING] * room
    assert inputs.token_ids.tolist() == expected.token_ids + nothing
    assert inputs.positions.tolist() == expected.positions + nothing
    slot_mapping = torch.tensor(expected.slot_mapping + [padding_kv_slot] * room)
    of_groups = [slot_mapping + group * GROUP_OFFSET * page_size for group in range(num_groups)]
    assert inputs.slot_mapping.tolist() == torch.stack(of_groups).tolist()
    assert inputs.query_start.tolist() == expected.query_start + [num_tokens] * room
    assert inputs.context_lens.tolist() == lens + nothing
    assert inputs.num_rows.tolist() == [len(rows)]
    assert inputs.row_slots.tolist() == [row.slot for row in rows] + [num_slots] * room
    logits = torch.stack((inputs.logits_indices, inputs.logits_slots, inputs.logits_positions), 1)
    assert [tuple(row) for row in logits.tolist()] == expected.logits + [(0, num_slots, 0)] * room
    assert torch.equal(result_tables.cpu(), in_groups(expected.tables, num_groups))
    for index, row in enumerate(rows):
        num_pages = -(-row.context_len // page_size)
        got = inputs.page_table[:, index, :num_pages].cpu()
        wanted = in_groups(expected.tables[row.slot, :num_pages], num_groups)
        assert torch.equal(got, wanted), f"row {index}"


def decode_row(slot: int, start: int, page_size: int) -> Row:
    """The page of a position that begins one is new, unless it was allocated earlier."""
    has_page = start % page_size == 0 and random.random() < 0.8
    pages = [random.randrange(10_000)] if has_page else []
    return Row(slot, start, [], start // page_size, pages, 1)


def chunk(slot: int, start: int, length: int, page_size: int, kind: str) -> Row:
    """A prompt or a piece of one: `kind` is first (after a prefix hit), next or last (maybe with drafts)."""
    end = -(-(start + length) // page_size)
    first_column = 0 if kind == "first" else -(-start // page_size)
    num_pages = max(0, end - first_column + random.choice([0, 0, 2]))  # a prompt may get its pages ahead
    pages = [random.randrange(10_000) for _ in range(num_pages)]
    tokens = [random.randrange(100) for _ in range(length)]
    num_logits = random.randint(1, min(length, 4)) if kind == "last" else random.randint(0, 1)
    return Row(slot, start, tokens, first_column, pages, num_logits)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("room", [0, 5])
@pytest.mark.parametrize("seed", range(6))
def test_random_steps(target: Target, seed: int, room: int, page_size: int, num_groups: int):
    random.seed(seed)
    num_slots, max_pages = 24, 60
    longest = max_pages * page_size
    slots = random.sample(range(num_slots), num_slots)
    rows = [
        decode_row(
            slots.pop(), random.choice([0, page_size, 3 * page_size, random.randrange(longest)]), page_size
        )
        for _ in range(random.randrange(0, 10))
    ]
    for _ in range(random.randrange(0 if rows else 1, 8)):
        start = random.choice([0, page_size, random.randrange(longest // 2)])
        length = random.choice([1, page_size, page_size + 1, random.randrange(1, longest // 3)])
        rows.append(chunk(slots.pop(), start, length, page_size, random.choice(["first", "next", "last"])))
    check(target, rows, page_size, num_slots, max_pages, room, num_groups)


def test_decode_rows_alone(target: Target, num_groups: int):
    check(target, [decode_row(slot, 16 * slot, 16) for slot in range(7)], 16, 9, 20, 0, num_groups)


def test_nothing_is_sampled_and_no_page_is_new(target: Target, num_groups: int):
    row = Row(3, 5, [1, 2, 3], 1, [], 0)
    check(target, [row], 16, 4, 8, 0, num_groups)
    check(target, [row], 16, 4, 8, 3, num_groups)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_long_prompt_behind_hundreds_of_rows(target: Target, page_size: int):
    random.seed(page_size)
    length = 8192 if target.large or target.backend == "torch" else 1500
    num_rows = 300 if target.large or target.backend == "torch" else 30
    slots = random.sample(range(num_rows + 2), num_rows + 1)
    rows = [decode_row(slot, random.randrange(2000 * page_size), page_size) for slot in slots[:-1]]
    rows.append(chunk(slots[-1], 1300 * page_size + 3, length, page_size, "first"))
    check(target, rows, page_size, num_rows + 2, 10_000, 700, 1)
