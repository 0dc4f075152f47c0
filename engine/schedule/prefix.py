"""The prefix cache: a radix tree over full pages, so that common prefixes are computed once.

A node has the tokens of one or more pages, and the pages; children branch at page borders. With four tokens
a page:

    root ─┬─ abcdefgh, pages 4 9 ─┬─ ijkl, page 2
          │                       └─ ijxy, page 7
          └─ abcd of namespace "tenant", page 5

Keys are compared in full, never by a hash alone: a dictionary finds the child that begins with the next
page's tokens, and the rest is compared as memory. A namespace is part of the keys below the root, so pages
computed in a namespace are found in that namespace only.

With several KV groups a column of the tree has a page of each group. Groups with a sliding window may have
holes (NO_PAGE): a sequence reads only the last tokens of a prefix there, and older pages are evicted alone.

A sequence that holds a page of a full group holds those of all columns before it. So cached pages of full
groups can always be evicted, from the leaves up, and those of window groups by leaving a hole: running
sequences can get every free or cached page.
"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.kv_layout import KVLayout, PageArray
from engine.outputs import NO_PAGE
from engine.schedule.pages import PagePool


class CacheListener(Protocol):
    """Gets each change of the cache, in order. Its methods must be quick and must not raise.

    Pages are those of one KV group, a full one if there is any: columns of the tree stay or leave with them.
    """

    def pages_cached(self, namespace: Hashable, tokens: bytes, pages: PageArray, parent: int | None) -> None:
        """Pages [num_columns] with `tokens` (int32) were inserted after page `parent`, or at the root."""

    def pages_evicted(self, pages: PageArray) -> None:
        """Pages [num_columns] were removed."""


class _Node:
    """A node of the tree: `key`, the tokens of `pages` [num_groups, num_columns] as bytes, and children.

    `name` is its key in the `children` of its parent.
    """

    __slots__ = ("children", "key", "name", "pages", "parent")

    def __init__(self, parent: "_Node | None", name: Hashable, key: bytes, pages: PageArray) -> None:
        self.parent = parent
        self.name = name
        self.key = key
        self.pages = pages
        self.children: dict[Hashable, _Node] = {}

    @property
    def num_columns(self) -> int:
        return int(self.pages.shape[1])


class PrefixCache:
    """Finds, inserts and evicts pages of computed tokens. Token ids are an `array("i")`.

    Pages are [num_groups, num_columns] int32. Eviction takes the requested number of pages from the least
    recently used leaves, from the end of each leaf. Finding and inserting take time linear in the number of
    tokens (comparing memory) and of branches on their path; evicting, in the number of evicted pages.
    """

    listeners: Sequence[CacheListener] = ()

    def __init__(self, pool: PagePool, layout: KVLayout) -> None:
        self.num_evicted_pages = 0
        self._pool = pool
        self._layout = layout
        self._listened_group = layout.full_groups[0] if layout.full_groups else 0
        self._page_bytes = pool.page_size * array("i").itemsize
        self._no_pages = np.empty((layout.num_groups, 0), np.int32)
        self._root = _Node(None, None, b"", self._no_pages)
        # Least recently used first, and a node always before its parent: using it uses all nodes above it.
        # Nodes without a cached page leave the order; a holder that ends uses them and brings them back.
        self._order: OrderedDict[_Node, None] = OrderedDict()

    def match(self, namespace: Hashable, token_ids: "array[int]", max_columns: int) -> PageArray:
        """Return the pages of the longest cached prefix of `token_ids`, at most `max_columns` columns.

        NO_PAGE in the columns to which a window does not reach back. The caller must share the pages before
        the next eviction.
        """
        key = memoryview(token_ids)[: max_columns * self._pool.page_size].tobytes()
        path, num_in_last = self._walk(namespace, key)
        if not path:
            return self._no_pages
        pages = _pages_of(path, num_in_last)
        if self._layout.window_groups:
            pages = self._cut_at_holes(pages)
            start = sum(node.num_columns for node in path)
            while path and (start := start - path[-1].num_columns) >= pages.shape[1]:
                path.pop()
            if not path:
                return self._no_pages
        self._use(path[-1])
        return pages

    def insert(
        self, namespace: Hashable, token_ids: "array[int]", pages: PageArray, *, is_leaving: bool = False
    ) -> PageArray:
        """Insert full pages of a sequence, all computed and held by it; return those of new columns.

        Where the cache has another sequence's pages for the first tokens, the pages after them are inserted
        only if no sequence will hold them: from their last holder, when it `is_leaving`, about to free them.
        A hole is filled with the sequence's page.
        """
        if self._layout.window_groups:  # a node of columns without any page would be useless
            pages = pages[:, : _num_columns_with(pages >= 0)]
        key = memoryview(token_ids)[: pages.shape[1] * self._pool.page_size].tobytes()
        path, num_in_last = self._walk(namespace, key)
        known = _pages_of(path, num_in_last) if path else self._no_pages
        num_known = known.shape[1]
        full = self._layout.full_groups
        is_own = not num_known or np.array_equal(known[full], pages[full, :num_known])
        if self._layout.window_groups and is_own:
            self._fill_holes(path, pages[:, :num_known])
        new = pages[:, num_known:].copy()
        new_pages = new[new >= 0]
        if not len(new_pages) or not (is_own or (is_leaving and self._pool.num_shared(new_pages) == 0)):
            if path:
                self._use(path[-1])
            return self._no_pages
        self._pool.keep(new_pages)
        tokens = key[num_known * self._page_bytes :]
        for listener in self.listeners:
            column = known[self._listened_group]
            parent = int(column[-1]) if num_known else None
            listener.pages_cached(namespace, tokens, new[self._listened_group].copy(), parent)
        self._use(self._attach(namespace, path, num_in_last, tokens, new))
        return new

    def evict(self, count: int) -> None:
        """Free `count` cached pages, or all if there are fewer; more where a whole column must go."""
        evicted: list[PageArray] = []
        num_left = min(count, self._pool.num_cached)
        was_restored = False
        while num_left > 0:
            if not self._order:
                assert not was_restored, "a cached page cannot be evicted"
                was_restored = True
                self._restore_order()
            node = next(iter(self._order))
            pages = self._take_cached(node, num_left)
            num_left -= len(pages)
            evicted.append(pages)
        if evicted:
            pages = np.concatenate(evicted)
            self.num_evicted_pages += len(pages)
            self._pool.drop(pages)

    def _take_cached(self, node: _Node, count: int) -> PageArray:
        """Remove up to `count` cached pages from `node`, and the others of a column that is removed."""
        num_kept = node.num_columns
        if not self._layout.window_groups:  # the held pages are those of its first columns
            num_held = self._pool.num_held(node.pages) // self._layout.num_groups
            if not node.children:
                num_kept = max(num_held, num_kept - -(-count // self._layout.num_groups))
            removed = self._cut(node, num_kept)
        else:
            is_held = self._pool.is_held(node.pages) & (node.pages >= 0)
            if not node.children:
                num_held = _num_columns_with(is_held)
                sizes = np.count_nonzero(node.pages >= 0, axis=0)[::-1].cumsum()
                num_kept = max(num_held, num_kept - int(sizes.searchsorted(count)) - 1)
            removed = self._cut(node, num_kept)
            removed = removed[removed >= 0]
            punched = self._punch(node, is_held[:, :num_kept], count - len(removed))
            removed = np.concatenate((removed, punched))
            self._cut_empty(node if num_kept else node.parent)
        if len(removed) < count:
            self._order.pop(node, None)
        return removed

    def _cut(self, node: _Node, num_columns: int) -> PageArray:
        """Cut a node to its first `num_columns` columns, or remove it at 0; return the pages cut off."""
        removed: PageArray = node.pages[:, num_columns:].ravel()
        if len(removed):
            for listener in self.listeners:
                listener.pages_evicted(node.pages[self._listened_group, num_columns:].copy())
        node.pages = node.pages[:, :num_columns]
        node.key = node.key[: num_columns * self._page_bytes]
        if not num_columns and node.parent is not None:
            self._order.pop(node, None)
            del node.parent.children[node.name]
        return removed

    def _punch(self, node: _Node, is_held: npt.NDArray[np.bool_], count: int) -> PageArray:
        """Remove up to `count` cached pages of window groups from `node`, first columns first."""
        is_cached = ~is_held & (node.pages >= 0)
        is_cached[self._layout.full_groups] = False
        columns, groups = (index[: max(0, count)] for index in np.nonzero(is_cached.T))
        pages = node.pages[groups, columns]
        node.pages[groups, columns] = NO_PAGE
        return pages

    def _cut_empty(self, node: _Node | None) -> None:
        """Remove columns without pages from the end of a leaf, and leaves without columns, upwards."""
        while node is not None and node.parent is not None and not node.children:
            num_kept = _num_columns_with(node.pages >= 0)
            self._cut(node, num_kept)
            if num_kept:
                return
            node = node.parent

    def _cut_at_holes(self, pages: PageArray) -> PageArray:
        """Return the longest prefix of `pages` with all pages that a next query reads, and only these."""
        layout, page_size = self._layout, self._pool.page_size
        ends = np.arange(1, pages.shape[1] + 1)
        is_whole = np.ones(len(ends), np.bool_)
        for group in layout.window_groups:
            after_last_hole = np.maximum.accumulate(np.where(pages[group] < 0, ends, 0))
            first = np.maximum(ends * page_size - layout.windows[group] + 1, 0) // page_size
            is_whole &= after_last_hole <= first
        num_columns = int(np.max(ends[is_whole], initial=0))
        pages = pages[:, :num_columns]
        for group, first in enumerate(layout.first_columns(num_columns * page_size)):
            pages[group, :first] = NO_PAGE
        return pages

    def _fill_holes(self, path: list[_Node], pages: PageArray) -> None:
        """Insert pages [num_groups, num_columns] of the columns along `path` where it has none."""
        start = 0
        for node in path:
            own = pages[:, start : start + node.num_columns]
            known = node.pages[:, : own.shape[1]]
            is_hole = (known < 0) & (own >= 0)
            if is_hole.any():
                self._pool.keep(own[is_hole])
                known[is_hole] = own[is_hole]
            start += node.num_columns

    def _walk(self, namespace: Hashable, key: bytes) -> tuple[list[_Node], int]:
        """Return the path of nodes that `key` matches, and the matching columns of the last one (>= 1)."""
        page_bytes = self._page_bytes
        path: list[_Node] = []
        num_in_last = 0
        node, start = self._root, 0
        while start < len(key):
            first = key[start : start + page_bytes]
            child = node.children.get(first if path else (namespace, first))
            if child is None:
                break
            path.append(child)
            if not key.startswith(child.key, start):
                num_in_last = _num_common_bytes(key, start, child.key) // page_bytes
                break
            num_in_last = child.num_columns
            start += len(child.key)
            node = child
        return path, num_in_last

    def _attach(
        self, namespace: Hashable, path: list[_Node], num_in_last: int, key: bytes, pages: PageArray
    ) -> _Node:
        """Add new columns after the last matching one of a path; return their node."""
        parent = path[-1] if path else self._root
        if path and num_in_last == parent.num_columns and not parent.children:
            parent.key += key
            parent.pages = np.concatenate((parent.pages, pages), axis=1)
            return parent
        if num_in_last < parent.num_columns:
            parent = self._split(parent, num_in_last)
        first = key[: self._page_bytes]
        name = first if path else (namespace, first)
        node = parent.children[name] = _Node(parent, name, key, pages)
        return node

    def _split(self, node: _Node, num_columns: int) -> _Node:
        """Move the first columns of `node` into a new node above it; return that."""
        border = num_columns * self._page_bytes
        assert node.parent is not None
        upper = _Node(node.parent, node.name, node.key[:border], node.pages[:, :num_columns])
        node.parent.children[node.name] = upper
        node.parent, node.name = upper, node.key[border : border + self._page_bytes]
        node.key, node.pages = node.key[border:], node.pages[:, num_columns:]
        upper.children[node.name] = node
        return upper

    def _use(self, node: _Node) -> None:
        """Make `node` and all above it the most recently used, itself first."""
        current = node
        while current.parent is not None:
            self._order[current] = None
            self._order.move_to_end(current)
            current = current.parent

    def _restore_order(self) -> None:
        """Bring all nodes back into the order, children first.

        Needed for cached pages that were inserted while a sequence ran and that its end did not use: a stop
        string removes tokens, and a failed step has computed none.
        """
        for node in _below(self._root):
            self._order[node] = None


def _below(node: _Node) -> Iterator[_Node]:
    """Yield all nodes below `node`, children before their parents."""
    stack, found = list(node.children.values()), []
    while stack:
        found.append(stack.pop())
        stack.extend(found[-1].children.values())
    return reversed(found)


def _num_columns_with(is_there: npt.NDArray[np.bool_]) -> int:
    """Return the number of columns up to the last one with a True element."""
    return int(np.max(np.nonzero(is_there)[1], initial=-1)) + 1


def _pages_of(path: list[_Node], num_in_last: int) -> PageArray:
    """Return the pages [num_groups, num_columns] of all columns along a path, in an array of their own."""
    return np.concatenate([*(node.pages for node in path[:-1]), path[-1].pages[:, :num_in_last]], axis=1)


def _num_common_bytes(key: bytes, start: int, edge: bytes) -> int:
    """Return the length of the common prefix of `key[start:]` and `edge`, in bytes."""
    length = min(len(key) - start, len(edge))
    differs = np.frombuffer(key, np.uint8, length, start) != np.frombuffer(edge, np.uint8, length)
    return int(differs.argmax()) if differs.any() else length
