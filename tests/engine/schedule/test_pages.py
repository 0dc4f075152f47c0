from array import array
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.schedule.pages import PagePool


def test_allocates_all_or_nothing():
    pool = PagePool(4, 16)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    assert sorted(pool.allocate(4) or []) == [0, 1, 2, 3]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_a_page_is_not_freed_twice():
    pool = PagePool(2, 16)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(pages)
    assert pool.num_free == 2


def test_freed_pages_are_allocated_first():
    pool = PagePool(100, 16)
    pages = pool.allocate(3)
    pool.free(pages)
    assert pool.allocate(3) == pages


def test_a_shared_page_is_freed_by_its_last_holder():
    pool = PagePool(4, 16)
    pages = pool.allocate(3)
    pool.share(pages[:2])
    assert pool.num_used == 3
    assert pool.free(pages).tolist() == pages[2:]
    assert (pool.num_used, pool.num_free) == (2, 2)
    assert pool.free(array("i", pages[:2])).tolist() == pages[:2]
    assert (pool.num_used, pool.num_free) == (0, 4)


def test_a_kept_page_is_cached_until_it_is_shared_or_dropped():
    pool = PagePool(4, 16)
    pages = pool.allocate(3)
    pool.keep(pages[:2])
    pool.free(pages)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 2, 0)
    assert pool.allocate(3) is None, "cached pages are not free"
    pool.share(pages[:1])
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 1, 1)
    assert pool.num_held(pages[:2]) == 1
    pool.drop(pages[1:2])
    assert (pool.num_free, pool.num_cached, pool.num_used) == (3, 0, 1)
    with pytest.raises(ValueError, match="only cached"):
        pool.drop(pages[:1])
    pool.free(pages[:1])
    pool.drop(pages[:1])
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]


def test_a_free_page_cannot_be_shared_or_kept():
    pool = PagePool(2, 16)
    with pytest.raises(ValueError, match="free page"):
        pool.share([0])
    with pytest.raises(ValueError, match="held"):
        pool.keep([0])


@given(st.integers(1, 30), st.lists(st.tuples(st.sampled_from("asfkd"), st.integers(0, 8)), max_size=80))
def test_every_page_is_free_used_or_cached(num_pages, operations):
    """Compare the pool with a model: the holders of each page and the set of kept pages."""
    pool = PagePool(num_pages, 1)
    holders: list[list[int]] = []
    kept: set[int] = set()
    for operation, number in operations:
        counts = Counter(page for pages in holders for page in pages)
        cached = sorted(kept - set(counts))
        if operation == "a":
            pages = pool.allocate(number)
            assert (pages is None) == (number > num_pages - len(counts.keys() | kept))
            assert not set(pages or ()) & (counts.keys() | kept), "a page in two hands without a count"
            holders += [pages] if pages else []
        elif operation == "s":
            pages = (holders[number % len(holders)] if holders else cached)[: number + 1]
            pool.share(np.array(pages, np.int32))
            holders += [list(pages)]
        elif operation == "f" and holders:
            pages = holders.pop(number % len(holders))
            left = {page for pages in holders for page in pages}
            assert set(pool.free(pages).tolist()) == set(pages) - left
        elif operation == "k" and holders:
            pool.keep(holders[number % len(holders)][:number])
            kept |= set(holders[number % len(holders)][:number])
        elif operation == "d":
            pool.drop(cached[:number])
            kept -= set(cached[:number])
        counts = Counter(page for pages in holders for page in pages)
        assert pool.num_used == len(counts)
        assert pool.num_cached == len(kept - set(counts))
        assert pool.num_free == num_pages - len(counts.keys() | kept)
        assert pool.num_held(range(num_pages)) == len(counts)
        assert np.flatnonzero(pool.is_held(range(num_pages))).tolist() == sorted(counts)
        assert pool.num_shared(range(num_pages)) == sum(count > 1 for count in counts.values())


def test_cells_count_the_pages_of_each_state():
    pool = PagePool(10, 16)
    pages = pool.allocate(6)
    pool.share(pages[:2])
    pool.keep(pages[4:])
    pool.free(pages[4:])
    per_cell, counts = pool.cells(4)
    assert per_cell == 3
    assert counts.tolist() == [[1, 2, 0], [1, 0, 2], [0, 0, 0], [0, 0, 0]]
    per_cell, counts = pool.cells(10)
    assert per_cell == 1
    assert counts.sum(axis=0).tolist() == [2, 2, 2]
