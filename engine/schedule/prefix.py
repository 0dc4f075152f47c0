"""The prefix cache: a radix tree over full pages, so that equal beginnings are computed once.

A node has the tokens of any number of pages, and the pages; children branch at page borders. With four
tokens a page:

    root ─┬─ abcdefgh, pages 4 9 ─┬─ ijkl, page 2
          │                       └─ ijxy, page 7
          └─ abcd of namespace "tenant", page 5

Keys are compared in full, never by a hash alone: a dictionary finds the child that begins with the next
page's tokens, the rest is compared as memory. A namespace is part of the keys below the root, so what was
computed in it is found in it only.

Who holds a page of the tree holds all pages above it. So what nobody holds can always be evicted, from the
leaves up: free and cached pages together are what running sequences can still get.
"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable

import numpy as np

from engine.schedule.pages import NO_PAGES, PageArray, PagePool, Pages


class _Node:
    """`key` are the tokens of `pages`, as bytes; `name` is what `parent.children` knows the node by."""

    __slots__ = ("children", "key", "name", "pages", "parent")

    def __init__(self, parent: "_Node | None", name: Hashable, key: bytes, pages: PageArray) -> None:
        self.parent = parent
        self.name = name
        self.key = key
        self.pages = pages
        self.children: dict[Hashable, _Node] = {}


class PrefixCache:
    """Finds, takes in and evicts pages of computed tokens. Token ids are an `array("i")`.

    Eviction takes the least recently used leaves, a leaf from its end, as many pages as are asked for.
    Everything costs time in the length of the tokens (by comparing memory) and in the number of branches on
    their way; evicting, in what is evicted.
    """

    def __init__(self, pool: PagePool) -> None:
        self.num_evicted_pages = 0
        self._pool = pool
        self._page_bytes = pool.page_size * array("i").itemsize
        self._root = _Node(None, None, b"", NO_PAGES)
        # Least recently used first, and a node always before its parent: a use is a use of all nodes above.
        # Nodes found to be held leave the order; the end of their holder is a use and brings them back.
        self._order: OrderedDict[_Node, None] = OrderedDict()

    def match(self, namespace: Hashable, token_ids: "array[int]", max_pages: int) -> PageArray:
        """The pages of the longest known beginning of `token_ids`, at most `max_pages` of them.

        The caller shares them before anything is evicted.
        """
        key = memoryview(token_ids)[: max_pages * self._pool.page_size].tobytes()
        path, num_in_last = self._walk(namespace, key)
        if not path:
            return NO_PAGES
        self._use(path[-1])
        return np.concatenate([*(node.pages for node in path[:-1]), path[-1].pages[:num_in_last]])

    def insert(
        self, namespace: Hashable, token_ids: "array[int]", pages: Pages, *, is_leaving: bool = False
    ) -> PageArray:
        """Take in full pages of a sequence, all computed and held by it; returns those that are new here.

        Where somebody else's pages of the same tokens are here already, those that would follow them are
        taken only if nobody will hold them: from their last holder, when it `is_leaving`, about to free them.
        """
        index = np.asarray(pages, np.int32)
        key = memoryview(token_ids)[: len(index) * self._pool.page_size].tobytes()
        path, num_in_last = self._walk(namespace, key)
        known = [node.pages for node in path[:-1]] + [node.pages[:num_in_last] for node in path[-1:]]
        num_known = sum(map(len, known))
        new = index[num_known:].copy()
        is_own = not known or np.array_equal(np.concatenate(known), index[:num_known])
        if not len(new) or not (is_own or (is_leaving and self._pool.num_shared(new) == 0)):
            if path:
                self._use(path[-1])
            return NO_PAGES
        self._pool.keep(new)
        self._use(self._attach(namespace, path, num_in_last, key[num_known * self._page_bytes :], new))
        return new

    def evict(self, count: int) -> None:
        """Free `count` cached pages, or all if there are fewer."""
        evicted: list[PageArray] = []
        while count > 0 and self._order:
            node = next(iter(self._order))
            num_held = self._pool.num_held(node.pages)
            assert num_held == len(node.pages) or not node.children, "a page is held, but not those above it"
            num_kept = max(num_held, len(node.pages) - count)
            if num_kept < len(node.pages):
                evicted.append(node.pages[num_kept:])
                count -= len(node.pages) - num_kept
                node.pages = node.pages[:num_kept]
                node.key = node.key[: num_kept * self._page_bytes]
            if num_kept == num_held:
                del self._order[node]
            if num_kept == 0 and node.parent is not None:
                del node.parent.children[node.name]
        if evicted:
            pages = np.concatenate(evicted)
            self.num_evicted_pages += len(pages)
            self._pool.drop(pages)

    def _walk(self, namespace: Hashable, key: bytes) -> tuple[list[_Node], int]:
        """The nodes that `key` leads through, and how many pages of the last one it shares (at least one)."""
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
            num_in_last = len(child.pages)
            start += len(child.key)
            node = child
        return path, num_in_last

    def _attach(
        self, namespace: Hashable, path: list[_Node], num_in_last: int, key: bytes, pages: PageArray
    ) -> _Node:
        """Add what is new behind the path; returns its node."""
        parent = path[-1] if path else self._root
        if path and num_in_last == len(parent.pages) and not parent.children:
            parent.key += key
            parent.pages = np.concatenate((parent.pages, pages))
            return parent
        if num_in_last < len(parent.pages):
            parent = self._split(parent, num_in_last)
        first = key[: self._page_bytes]
        name = first if path else (namespace, first)
        node = parent.children[name] = _Node(parent, name, key, pages)
        return node

    def _split(self, node: _Node, num_pages: int) -> _Node:
        """Put the first `num_pages` pages of `node` into a node of their own, above it; returns that."""
        border = num_pages * self._page_bytes
        assert node.parent is not None
        upper = _Node(node.parent, node.name, node.key[:border], node.pages[:num_pages])
        node.parent.children[node.name] = upper
        node.parent, node.name = upper, node.key[border : border + self._page_bytes]
        node.key, node.pages = node.key[border:], node.pages[num_pages:]
        upper.children[node.name] = node
        return upper

    def _use(self, node: _Node) -> None:
        """Make `node` and all above it the most recently used, itself first."""
        current = node
        while current.parent is not None:
            self._order[current] = None
            self._order.move_to_end(current)
            current = current.parent


def _num_common_bytes(key: bytes, start: int, edge: bytes) -> int:
    """Length of the common beginning of `key[start:]` and `edge`."""
    length = min(len(key) - start, len(edge))
    differs = np.frombuffer(key, np.uint8, length, start) != np.frombuffer(edge, np.uint8, length)
    return int(differs.argmax()) if differs.any() else length
