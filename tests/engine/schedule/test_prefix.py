"""The radix tree: first by hand, then by a machine that writes into every page what it stands for."""

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.schedule.pages import PagePool
from engine.schedule.prefix import PrefixCache


def ids(text: str) -> "array[int]":
    """A token for each character."""
    return array("i", map(ord, text))


class Cache:
    """A pool and a tree, with the steps of a sequence's life that concern them."""

    def __init__(self, num_pages: int = 100, page_size: int = 1):
        self.pool = PagePool(num_pages, page_size)
        self.tree = PrefixCache(self.pool)

    def take(self, text: str, namespace: object = None) -> list[int]:
        """Pages for all of `text`: known ones are shared, the others allocated."""
        num_pages = len(text) // self.pool.page_size
        hits = self.tree.match(namespace, ids(text), num_pages)
        self.pool.share(hits)
        self.tree.evict(num_pages - len(hits) - self.pool.num_free)
        return [*hits.tolist(), *self.pool.allocate(num_pages - len(hits))]

    def leave(self, text: str, pages: list[int], namespace: object = None) -> None:
        self.tree.insert(namespace, ids(text), pages, is_leaving=True)
        self.pool.free(pages)

    def remember(self, text: str, namespace: object = None) -> list[int]:
        """A sequence that computes `text` and ends."""
        pages = self.take(text, namespace)
        self.leave(text, pages, namespace)
        return pages

    def known(self, text: str, namespace: object = None) -> int:
        """How many pages of `text` are known (asking is a use)."""
        return len(self.tree.match(namespace, ids(text), len(text) // self.pool.page_size))


def test_what_was_computed_is_found():
    cache = Cache()
    pages = cache.remember("abcdef")
    assert cache.tree.match(None, ids("abcdef"), 6).tolist() == pages
    assert cache.tree.match(None, ids("abcxyz"), 6).tolist() == pages[:3]
    assert cache.tree.match(None, ids("abcdef"), 5).tolist() == pages[:5]
    assert cache.tree.match(None, ids("abcdefg"), 7).tolist() == pages
    assert cache.known("xabc") == 0
    assert (cache.pool.num_cached, cache.pool.num_used) == (6, 0)


@pytest.mark.parametrize("page_size", [1, 2, 4, 16, 32, 64])
def test_only_full_pages_are_known_and_they_branch_at_page_borders(page_size):
    cache = Cache(page_size=page_size)
    common, left, right = "c" * (2 * page_size), "l" * page_size, "r" * page_size
    cache.remember(common + left)
    cache.remember(common + right)
    assert cache.pool.num_cached == 4
    assert cache.known(common + left + "x") == 3
    assert cache.known(common + right) == 3
    assert cache.known(common + right[:-1] + "x" + left) == 2
    assert cache.known("c" * (page_size + page_size // 2)) == 1


def test_a_conversation_grows_its_own_branch():
    cache = Cache(page_size=2)
    first = cache.remember("system:hello")
    second = cache.remember("system:hello, world")
    assert second[: len(first)] == first
    assert cache.known("system:hello, worlds") == 9


def test_namespaces_do_not_know_each_other():
    cache = Cache()
    cache.remember("abc", namespace=("salt", None))
    assert cache.known("abc") == 0
    assert cache.known("abc", namespace=("pepper", None)) == 0
    assert cache.known("abc", namespace=("salt", None)) == 3


def test_the_least_recently_used_leaf_goes_first_and_from_its_end():
    cache = Cache()
    cache.remember("abcd")
    cache.remember("abxy")
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


def test_what_a_sequence_holds_is_never_evicted():
    cache = Cache(num_pages=8)
    running = cache.take("abc")
    cache.tree.insert(None, ids("abc"), running)
    cache.remember("abcde")
    assert cache.pool.num_cached == 2
    cache.tree.evict(100)
    assert (cache.pool.num_used, cache.pool.num_cached, cache.pool.num_free) == (3, 0, 5)
    assert cache.known("abcde") == 3
    cache.leave("abc", running)
    cache.tree.evict(100)
    assert cache.pool.num_free == 8


def test_two_that_compute_the_same_keep_their_own_pages():
    cache = Cache()
    first, second = cache.take("abcd"), cache.take("abcd")
    assert not set(first) & set(second)
    assert cache.tree.insert(None, ids("ab"), first[:2]).tolist() == first[:2]
    assert not len(cache.tree.insert(None, ids("abcd"), second)), "it would hang below pages it does not hold"
    cache.leave("abcd", first)
    cache.leave("abcd", second)
    assert cache.tree.match(None, ids("abcd"), 4).tolist() == first
    assert cache.pool.num_free == 96, "what was computed twice is kept once"


def test_pages_that_others_hold_do_not_hang_below_somebody_elses():
    """Two compute a beginning; the second goes on, is forked, and leaves before the first."""
    cache = Cache()
    first, leader = cache.take("ab"), cache.take("abcd")
    cache.tree.insert(None, ids("ab"), first)
    cache.pool.share(leader)
    assert not len(cache.tree.insert(None, ids("abcd"), leader, is_leaving=True))
    cache.pool.free(leader)
    cache.leave("ab", first)
    cache.tree.evict(100)
    assert cache.pool.num_free == 96
    cache.leave("abcd", leader)
    assert cache.known("abcd") == 4


def test_a_long_prompt_is_one_node_at_page_size_one():
    cache = Cache(num_pages=5000)
    text = "".join(map(chr, range(1000, 3000)))
    cache.remember(text)
    cache.remember(text + "a")
    assert len(cache.tree._order) == 1
    cache.remember(text[:1500] + "b")
    assert len(cache.tree._order) == 3


class PrefixMachine(RuleBasedStateMachine):
    """Sequences come, compute, share and leave; every page has its whole prefix written on it."""

    @initialize(page_size=st.sampled_from([1, 2, 3]))
    def start(self, page_size):
        self.page_size = page_size
        self.cache = Cache(num_pages=24, page_size=page_size)
        self.content: dict[int, tuple[object, str]] = {}
        self.held: list[tuple[object, str, list[int], int]] = []  # with the number of computed pages

    def _compute(self, namespace: object, text: str, pages: list[int], start: int, end: int) -> None:
        for index in range(start, end):
            self.content[pages[index]] = (namespace, text[: (index + 1) * self.page_size])

    @rule(text=st.text("ab", min_size=1, max_size=16), namespace=st.sampled_from([None, "salt"]))
    def begin(self, text, namespace):
        num_pages = len(text) // self.page_size
        hits = self.cache.tree.match(namespace, ids(text), num_pages)
        for index, page in enumerate(hits.tolist()):
            assert self.content[page] == (namespace, text[: (index + 1) * self.page_size]), "a stale page"
        cached = len(hits) - self.cache.pool.num_held(hits)
        available = self.cache.pool.num_free + self.cache.pool.num_cached - cached
        if num_pages - len(hits) <= available:
            pages = self.cache.take(text, namespace)
            for page in pages[len(hits) :]:
                self.content.pop(page, None)
            self.held.append((namespace, text, pages, len(hits)))

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 100), num_pages=st.integers(1, 8), tell=st.booleans())
    def compute(self, index, num_pages, tell):
        namespace, text, pages, start = self.held[index % len(self.held)]
        end = min(len(pages), start + num_pages)
        self._compute(namespace, text, pages, start, end)
        self.held[index % len(self.held)] = (namespace, text, pages, end)
        if tell:
            new = self.cache.tree.insert(namespace, ids(text), pages[:end])
            assert set(new.tolist()) <= set(pages[:end])

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 100))
    def fork(self, index):
        namespace, text, pages, computed = self.held[index % len(self.held)]
        self.cache.pool.share(pages[:computed])
        self.held.append((namespace, text[: computed * self.page_size], pages[:computed], computed))

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 100))
    def leave(self, index):
        namespace, text, pages, computed = self.held.pop(index % len(self.held))
        self.cache.tree.insert(namespace, ids(text), pages[:computed], is_leaving=True)
        self.cache.pool.free(pages)

    @rule(number=st.integers(1, 8))
    def evict(self, number):
        pool = self.cache.pool
        free, cached = pool.num_free, pool.num_cached
        self.cache.tree.evict(number)
        assert pool.num_free - free == min(number, cached), "what nobody holds can be evicted"
        assert pool.num_cached == cached - min(number, cached)

    @invariant()
    def the_tree_is_sound(self):
        if not hasattr(self, "cache"):
            return
        pool, tree = self.cache.pool, self.cache.tree
        holders: dict[int, int] = {}
        for _, _, pages, _ in self.held:
            for page in pages:
                holders[page] = holders.get(page, 0) + 1
        seen: list[int] = []

        def check(node, is_above_held):
            for name, child in node.children.items():
                assert child.name == name
                assert child.parent is node
                assert len(child.key) == len(child.pages) * self.page_size * 4 > 0
                is_held = is_above_held
                for page in child.pages.tolist():
                    assert is_held or page not in holders, "held below a page that is not"
                    is_held = page in holders
                    seen.append(page)
                check(child, is_held)

        check(tree._root, True)
        assert len(seen) == len(set(seen)), "a page is in the tree twice"
        assert pool.num_used == len(holders)
        assert pool.num_cached == len(set(seen) - holders.keys())

    def teardown(self):
        if hasattr(self, "cache"):
            while self.held:
                self.leave(0)
            self.cache.tree.evict(100)
            assert self.cache.pool.num_free == 24
            assert not self.cache.tree._root.children


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
