"""The work list of decode attention: its items cover the keys of each row, and a row's cuts are its own.

What is computed from the list is tested in test_paged_attention.py.
"""

from typing import NamedTuple

import pytest
import torch

from kernels.decode_splits import RECORD, list_items_kernel
from tests.kernels.conftest import Target

BLOCK_N, SPLIT, MAX_SPLITS = 32, 128, 4
NUM_KV_HEADS = 2
END = -1  # row of the records after the last item


class Item(NamedTuple):
    """A record of the list: keys from `begin` up to `end` of a row, and the place of the result."""

    row: int
    begin: int
    end: int
    context_len: int
    size: int
    item: int
    num_items: int
    place: int


def list_items(target: Target, rows: list[tuple[int, int]], num_workers: int, window: int = 0) -> list[Item]:
    """Return the items of rows (query_len, context_len); check what follows the last of them."""
    if target.backend == "torch":
        pytest.skip("has no work list")
    query_lens, context_lens = zip(*rows, strict=True)
    query_start = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    work = torch.full(((len(rows) * MAX_SPLITS + num_workers) * RECORD,), -9, dtype=torch.int32)
    arrived = torch.full((len(rows) + 1, NUM_KV_HEADS), 7, dtype=torch.int32)
    lens = torch.tensor(context_lens, dtype=torch.int32)
    query_start, lens, work, arrived = target.to(query_start, lens, work, arrived)
    list_items_kernel[(1,)](
        query_start,
        lens,
        work,
        arrived,
        len(rows),
        num_workers,
        NUM_KV_HEADS=NUM_KV_HEADS,
        WINDOW=window,
        ROWS_BLOCK=16,
        BLOCK_N=BLOCK_N,
        SPLIT=SPLIT,
        MAX_SPLITS=MAX_SPLITS,
    )
    assert arrived.tolist() == [[0, 0]] * len(rows) + [[7, 7]]
    records = work.view(-1, RECORD).tolist()
    items = [Item(*record) for record in records[: [record[0] for record in records].index(END)]]
    ends = records[len(items) : len(items) + num_workers]
    assert [record[0] for record in ends] == [END] * num_workers
    return items


def items_of(row: int, items: list[Item]) -> list[Item]:
    return sorted((item for item in items if item.row == row), key=lambda item: item.item)


LENGTHS = (1, 127, 128, 129, 300, 512, 513, 2000)


@pytest.mark.parametrize("window", [0, 200])
@pytest.mark.parametrize("num_workers", [1, 3, 8, 64])
def test_items_cover_the_keys_of_each_row_once(target: Target, num_workers: int, window: int):
    items = list_items(target, [(1, length) for length in LENGTHS], num_workers, window)
    places: list[int] = []
    for row, length in enumerate(LENGTHS):
        own = items_of(row, items)
        first = max(0, length - window) // BLOCK_N * BLOCK_N if window else 0
        assert [item.begin for item in own] == [first, *(item.end for item in own[:-1])]
        assert own[-1].end == length
        assert [item.item for item in own] == list(range(len(own)))
        assert {(item.context_len, item.num_items) for item in own} == {(length, len(own))}
        assert len({item.place for item in own}) == 1
        places += range(own[0].place, own[0].place + len(own))
    assert places == list(range(len(items))), "results do not overlap"


@pytest.mark.parametrize("window", [0, 200])
def test_the_cuts_of_a_row_depend_on_its_length_only(target: Target, window: int):
    """More work than workers merges the first splits of a row and moves no cut."""
    for length in LENGTHS:
        [*alone] = list_items(target, [(1, length)], 64, window)
        cuts = {item.end for item in alone}
        for num_workers in (1, 3):
            among = list_items(target, [(1, 700), (1, length), (1, 5000)], num_workers, window)
            own = items_of(1, among)
            assert {item.size for item in own} == {item.size for item in alone}
            assert {item.end for item in own} <= cuts
            assert all(item.end - item.begin <= item.size for item in own[1:])


def test_long_rows_have_larger_splits_and_no_more_of_them(target: Target):
    items = list_items(target, [(1, MAX_SPLITS * SPLIT), (1, MAX_SPLITS * SPLIT + 1)], 64)
    assert [item.size for item in items_of(0, items)] == [SPLIT] * MAX_SPLITS
    assert [item.size for item in items_of(1, items)] == [2 * SPLIT] * 3


@pytest.mark.parametrize("num_workers", [3, 8, 64])
def test_long_items_come_first(target: Target, num_workers: int):
    items = list_items(target, [(1, length) for length in LENGTHS], num_workers)
    kinds = [(item.end - item.begin > item.size) - (item.end - item.begin < item.size) for item in items]
    assert kinds == sorted(kinds, reverse=True)


def test_rows_with_several_queries_are_not_listed(target: Target):
    items = list_items(target, [(1, 300), (5, 300), (1, 10), (2, 2)], 4)
    assert {item.row for item in items} == {0, 2}
