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


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for(num_tokens, num_pages):
    assert PagePool(4, 16).pages_for(num_tokens) == num_pages


def test_a_page_is_not_freed_twice():
    pool = PagePool(2, 16)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(pages)


def test_freed_pages_come_back_first():
    pool = PagePool(100, 16)
    pages = pool.allocate(3)
    pool.free(pages)
    assert pool.allocate(3) == pages


@given(st.integers(1, 30), st.lists(st.integers(-5, 8), max_size=60))
def test_every_page_is_free_or_held_once(num_pages, operations):
    pool = PagePool(num_pages, 1)
    held: list[list[int]] = []
    for operation in operations:
        if operation >= 0:
            pages = pool.allocate(operation)
            assert (pages is None) == (operation > num_pages - sum(map(len, held)))
            held += [pages] if pages else []
        elif held:
            pool.free(held.pop(-operation % len(held)))
        flat = [page for pages in held for page in pages]
        assert len(set(flat)) == len(flat), "a page is in two hands"
        assert set(flat) <= set(range(num_pages))
        assert pool.num_used == len(flat)
        assert pool.num_free == num_pages - len(flat)
