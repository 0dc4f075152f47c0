"""The radix tree: examples, then a state machine that writes its whole prefix into every page."""

from array import array

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv_layout import KVLayout
from engine.outputs import NO_PAGE
from engine.schedule.pages import PagePool
from engine.schedule.prefix import PrefixCache


def ids(text: str) -> "array[int]":
    """Return one token for each character."""
    return array("i", map(ord, text))


class Cache:
    """A pool and a tree, with the steps of a sequence's life that concern them."""

    def __init__(self, num_pages: int = 100, page_size: int = 1, windows: tuple[int, ...] = (0,)):
        self.pool = PagePool(num_pages, page_size)
        self.layout = KVLayout(windows, page_size, token_budget=1000, run_ahead=0)
        self.tree = PrefixCache(self.pool, self.layout)

    def match(self, text: str, namespace: object = None, max_columns: int | None = None) -> np.ndarray:
        num_columns = len(text) // self.pool.page_size
        return self.tree.match(namespace, ids(text), num_columns if max_columns is None else max_columns)

    def take(self, text: str, namespace: object = None) -> np.ndarray:
        """Return pages for all of `text`: cached ones are shared, the others allocated."""
        num_columns = len(text) // self.pool.page_size
        hits = self.match(text, namespace)
        self.pool.share(hits[hits >= 0])
        num_new = (num_columns - hits.shape[1]) * len(hits)
        self.tree.evict(num_new - self.pool.num_free)
        new = np.array(self.pool.allocate(num_new), np.int32).reshape(len(hits), -1)
        return np.concatenate((hits, new), axis=1)

    def free(self, pages: np.ndarray) -> None:
        self.pool.free(pages[pages >= 0])

    def leave(self, text: str, pages: np.ndarray, namespace: object = None) -> None:
        self.tree.insert(namespace, ids(text), pages, is_leaving=True)
        self.free(pages)

    def leave_windows(self, text: str, pages: np.ndarray, num_tokens: int, namespace: object = None) -> None:
        """Free the pages that no query from position `num_tokens` on reads."""
        self.tree.insert(namespace, ids(text), pages[:, : num_tokens // self.pool.page_size])
        for group, first in enumerate(self.layout.first_columns(num_tokens)):
            self.free(pages[group, :first])
            pages[group, :first] = NO_PAGE

    def compute(self, text: str, namespace: object = None) -> np.ndarray:
        """Run a sequence that computes `text` and ends."""
        pages = self.take(text, namespace)
        self.leave(text, pages, namespace)
        return pages

    def known(self, text: str, namespace: object = None) -> int:
        """Return how many pages of `text` are cached, which also marks them as used."""
        return self.match(text, namespace).shape[1]


def test_inserted_pages_are_found():
    cache = Cache()
    pages = cache.compute("abcdef")
    assert cache.match("abcdef").tolist() == pages.tolist()
    assert cache.match("abcxyz").tolist() == pages[:, :3].tolist()
    assert cache.match("abcdef", max_columns=5).tolist() == pages[:, :5].tolist()
    assert cache.match("abcdefg").tolist() == pages.tolist()
    assert cache.known("xabc") == 0
    assert (cache.pool.num_cached, cache.pool.num_used) == (6, 0)


@pytest.mark.parametrize("page_size", [1, 2, 4, 16, 32, 64])
def test_only_full_pages_are_cached_and_branches_begin_at_page_borders(page_size):
    cache = Cache(page_size=page_size)
    common, left, right = "c" * (2 * page_size), "l" * page_size, "r" * page_size
    cache.compute(common + left)
    cache.compute(common + right)
    assert cache.pool.num_cached == 4
    assert cache.known(common + left + "x") == 3
    assert cache.known(common + right) == 3
    assert cache.known(common + right[:-1] + "x" + left) == 2
    assert cache.known("c" * (page_size + page_size // 2)) == 1


def test_a_conversation_extends_its_own_branch():
    cache = Cache(page_size=2)
    first = cache.compute("system:hello")
    second = cache.compute("system:hello, world")
    assert second[:, : first.shape[1]].tolist() == first.tolist()
    assert cache.known("system:hello, worlds") == 9


def test_namespaces_share_no_pages():
    cache = Cache()
    cache.compute("abc", namespace=("salt", None))
    assert cache.known("abc") == 0
    assert cache.known("abc", namespace=("pepper", None)) == 0
    assert cache.known("abc", namespace=("salt", None)) == 3


def test_the_least_recently_used_leaf_is_evicted_first_from_its_end():
    cache = Cache()
    cache.compute("abcd")
    cache.compute("abxy")
    cache.known("abcd")
    cache.tree.evict(1)
    assert (cache.known("abcd"), cache.known("abxy")) == (4, 3)
    cache.known("abcd")
    cache.tree.evict(2)
    assert (cache.known("abxy"), cache.known("abcd")) == (2, 3)
    cache.tree.evict(100)
    assert cache.pool.num_free == 100
    assert cache.tree.num_evicted_pages == 6
    assert cache.known("abcd") == 0


def test_pages_with_a_holder_are_never_evicted():
    cache = Cache(num_pages=8)
    running = cache.take("abc")
    cache.tree.insert(None, ids("abc"), running)
    cache.compute("abcde")
    assert cache.pool.num_cached == 2
    cache.tree.evict(100)
    assert (cache.pool.num_used, cache.pool.num_cached, cache.pool.num_free) == (3, 0, 5)
    assert cache.known("abcde") == 3
    cache.leave("abc", running)
    cache.tree.evict(100)
    assert cache.pool.num_free == 8


def test_two_sequences_with_equal_tokens_keep_their_own_pages():
    cache = Cache()
    first, second = cache.take("abcd"), cache.take("abcd")
    assert not set(first.flat) & set(second.flat)
    assert cache.tree.insert(None, ids("ab"), first[:, :2]).tolist() == first[:, :2].tolist()
    assert not cache.tree.insert(None, ids("abcd"), second).size, "it would hang below pages it does not hold"
    cache.leave("abcd", first)
    cache.leave("abcd", second)
    assert cache.match("abcd").tolist() == first.tolist()
    assert cache.pool.num_free == 96, "what was computed twice is kept once"


def test_held_pages_are_not_inserted_below_another_sequences_pages():
    """Two compute the same prefix; the second continues, is forked, and ends before the first."""
    cache = Cache()
    first, leader = cache.take("ab"), cache.take("abcd")
    cache.tree.insert(None, ids("ab"), first)
    cache.pool.share(leader[0])
    assert not cache.tree.insert(None, ids("abcd"), leader, is_leaving=True).size
    cache.pool.free(leader[0])
    cache.leave("ab", first)
    cache.tree.evict(100)
    assert cache.pool.num_free == 96
    cache.leave("abcd", leader)
    assert cache.known("abcd") == 4


def test_a_long_prompt_is_one_node_at_page_size_one():
    cache = Cache(num_pages=5000)
    text = "".join(map(chr, range(1000, 3000)))
    cache.compute(text)
    cache.compute(text + "a")
    assert len(cache.tree._order) == 1
    cache.compute(text[:1500] + "b")
    assert len(cache.tree._order) == 3


# Sliding windows: pages of 1 token, so that a query reads its own page and window - 1 before it.


def test_a_hit_needs_only_what_the_next_query_reads():
    cache = Cache(windows=(0, 3))
    pages = cache.take("abcdef")
    cache.leave_windows("abcdef", pages, 6)
    cache.leave("abcdef", pages)
    assert cache.pool.num_cached == 12, "what left the window is cached"
    hit = cache.match("abcdef")
    assert hit[0].tolist() == pages[0].tolist()
    assert hit[1].tolist() == [NO_PAGE] * 4 + pages[1, 4:].tolist()
    assert cache.match("abxyz")[1].tolist() != [NO_PAGE] * 2


def test_a_hit_ends_where_no_window_has_a_hole():
    cache = Cache(windows=(0, 3))
    for text in ("abcdef", "abcdefghi"):
        pages = cache.take(text)
        cache.leave_windows(text, pages, 6)
        if text == "abcdef":
            cache.leave(text, pages)
    assert cache.known("abcxyz") == 3
    cache.tree.evict(4)
    assert cache.pool.num_cached == 0, "four pages that the window left, though the sequence goes on"
    assert cache.known("abcdef") == 6
    assert cache.known("abcdx") == 0, "the two pages before are gone"
    cache.leave("abcdefghi", pages)
    assert cache.known("abcdefghi") == 9
    assert cache.known("abcdefghx") == 8
    assert [cache.known("abcdefghi"[:length]) for length in range(1, 7)] == [0, 0, 0, 0, 0, 6]


def test_a_hole_is_filled_by_the_next_sequence():
    cache = Cache(windows=(3,))
    pages = cache.take("abcdef")
    cache.leave_windows("abcdef", pages, 6)
    cache.tree.evict(100)
    assert cache.known("abc") == 0
    cache.leave("abcdef", pages)
    cache.compute("abc")
    assert [cache.known(text) for text in ("abc", "abcd", "abcde", "abcdef")] == [3, 3, 3, 6]
    cache.tree.evict(100)
    assert cache.pool.num_free == 100
    assert not cache.tree._root.children, "no node without pages is left"


@pytest.mark.parametrize("windows", [(3,), (0, 3), (2, 0, 0)])
def test_eviction_reaches_all_cached_pages(windows):
    cache = Cache(windows=windows)
    texts = ["abcdefgh", "abcdexyz", "abq"]
    held = [cache.take(text) for text in texts]
    for text, pages in zip(texts, held, strict=True):
        cache.leave_windows(text, pages, len(text))
    num_held = len({page for pages in held for page in pages.flat if page >= 0})
    cache.tree.evict(100)
    assert (cache.pool.num_cached, cache.pool.num_used) == (0, num_held)
    for text, pages in zip(texts, held, strict=True):
        cache.leave(text, pages)
    cache.tree.evict(100)
    assert cache.pool.num_free == 100
    assert not cache.tree._root.children


class PrefixMachine(RuleBasedStateMachine):
    """Sequences start, compute, share and end; the whole prefix of every page is written into it."""

    windows: tuple[int, ...] = (0,)

    @initialize(page_size=st.sampled_from([1, 2, 3]))
    def start(self, page_size):
        self.page_size = page_size
        self.num_pages = 24 * len(self.windows)
        self.cache = Cache(self.num_pages, page_size, self.windows)
        self.content: dict[int, tuple[int, object, str]] = {}
        self.held: list[tuple[object, str, np.ndarray, int]] = []  # with the number of computed columns

    def _compute(self, namespace: object, text: str, pages: np.ndarray, start: int, end: int) -> None:
        for group, column in enumerate(pages):
            for index in range(start, end):
                self.content[column[index]] = (group, namespace, text[: (index + 1) * self.page_size])

    @rule(text=st.text("ab", min_size=1, max_size=16), namespace=st.sampled_from([None, "salt"]))
    def begin(self, text, namespace):
        num_columns = len(text) // self.page_size
        hits = self.cache.match(text, namespace)
        reads = self.cache.layout.first_columns(hits.shape[1] * self.page_size)
        for group, column in enumerate(hits.tolist()):
            for index, page in enumerate(column):
                assert (page == NO_PAGE) == (index < reads[group])
                if page != NO_PAGE:
                    known = (group, namespace, text[: (index + 1) * self.page_size])
                    assert self.content[page] == known, "a stale page"
        found = hits[hits >= 0]
        cached = len(found) - self.cache.pool.num_held(found)
        available = self.cache.pool.num_free + self.cache.pool.num_cached - cached
        if (num_columns - hits.shape[1]) * len(hits) <= available:
            pages = self.cache.take(text, namespace)
            for page in pages[:, hits.shape[1] :].flat:
                self.content.pop(page, None)
            self.held.append((namespace, text, pages, hits.shape[1]))

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 100), num_columns=st.integers(1, 8), insert=st.booleans())
    def compute(self, index, num_columns, insert):
        namespace, text, pages, start = self.held[index % len(self.held)]
        end = min(pages.shape[1], start + num_columns)
        self._compute(namespace, text, pages, start, end)
        self.held[index % len(self.held)] = (namespace, text, pages, end)
        if insert:
            new = self.cache.tree.insert(namespace, ids(text), pages[:, :end])
            assert set(new.flat) <= {*pages[:, :end].flat, NO_PAGE}

    @precondition(lambda self: self.held and any(self.windows))
    @rule(index=st.integers(0, 100))
    def move_window(self, index):
        namespace, text, pages, computed = self.held[index % len(self.held)]
        self.cache.leave_windows(text, pages, computed * self.page_size, namespace)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 100))
    def fork(self, index):
        namespace, text, pages, computed = self.held[index % len(self.held)]
        pages = pages[:, :computed].copy()
        self.cache.pool.share(pages[pages >= 0])
        self.held.append((namespace, text[: computed * self.page_size], pages, computed))

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 100))
    def leave(self, index):
        namespace, text, pages, computed = self.held.pop(index % len(self.held))
        self.cache.tree.insert(namespace, ids(text), pages[:, :computed], is_leaving=True)
        self.cache.free(pages)

    @rule(number=st.integers(1, 8))
    def evict(self, number):
        pool = self.cache.pool
        free, cached = pool.num_free, pool.num_cached
        self.cache.tree.evict(number)
        expected, most = min(number, cached), min(number + len(self.windows) - 1, cached)
        assert expected <= pool.num_free - free <= most, "all pages without a holder can be evicted"
        assert pool.num_cached == cached - (pool.num_free - free)

    @invariant()
    def the_tree_is_sound(self):
        if not hasattr(self, "cache"):
            return
        pool, tree = self.cache.pool, self.cache.tree
        holders: dict[int, int] = {}
        for _, _, pages, _ in self.held:
            for page in pages[pages >= 0].tolist():
                holders[page] = holders.get(page, 0) + 1
        seen: list[int] = []
        full = self.cache.layout.full_groups

        def check(node, is_above_held):
            for name, child in node.children.items():
                assert child.name == name
                assert child.parent is node
                assert len(child.key) == child.pages.shape[1] * self.page_size * 4 > 0
                is_held = is_above_held
                for column in child.pages.T.tolist():
                    assert all(column[group] != NO_PAGE for group in full), "a hole in a full group"
                    seen.extend(page for page in column if page != NO_PAGE)
                    if full:
                        assert is_held or not holders.keys() & column, "held below a page that is not"
                        is_held = column[full[0]] in holders
                assert child.children or any(page != NO_PAGE for page in child.pages[:, -1])
                check(child, is_held)

        check(tree._root, True)
        assert len(seen) == len(set(seen)), "a page is in the tree twice"
        assert pool.num_used == len(holders)
        assert pool.num_cached == len(set(seen) - holders.keys())

    def teardown(self):
        if hasattr(self, "cache"):
            while self.held:
                self.leave(0)
            self.cache.tree.evict(self.num_pages)
            assert self.cache.pool.num_free == self.num_pages
            assert not self.cache.tree._root.children


class WindowMachine(PrefixMachine):
    windows = (4,)


class MixedMachine(PrefixMachine):
    windows = (2, 0, 5)


TestPrefixMachine = PrefixMachine.TestCase
TestWindowMachine = WindowMachine.TestCase
TestMixedMachine = MixedMachine.TestCase
for case in (TestPrefixMachine, TestWindowMachine, TestMixedMachine):
    case.settings = settings(max_examples=150, stateful_step_count=40)
