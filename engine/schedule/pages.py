"""The pool of KV pages: allocates them, counts their holders, and keeps pages for reuse.

A page holds the keys and values of `page_size` consecutive tokens in the layers of one KV group. The pool
knows page numbers only; the tensors belong to the device thread. Every page is in one of three states:

    free ──allocate──▶ used ──free (last holder), unless kept──▶ free
                       │  ▲
      free (last       │  │ share
      holder), if kept ▼  │
                      cached ──drop──▶ free

A used page is held by one sequence or by several (its count). The prefix cache marks the pages in its tree as
kept; a kept page without a holder is cached.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.kv_layout import PageArray

Pages = PageArray | Sequence[int]

NO_PAGES = np.empty(0, np.int32)


class PagePool:
    """Allocates page numbers `0 .. num_pages - 1` and counts their holders.

    Freed pages are allocated again first (last in, first out): they may still be in the CPU's cache, and
    untouched memory stays untouched.

    Arguments are arrays of distinct pages; an `array("i")` or an int32 numpy array is not copied. `num_free`
    and `num_cached` are for reading.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages: {num_pages=}, {page_size=}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_free = num_pages
        self.num_cached = 0
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # a stack: its top is at num_free
        self._counts = np.zeros(num_pages, np.int32)
        self._is_kept = np.zeros(num_pages, np.bool_)

    @property
    def num_used(self) -> int:
        """The number of pages held by sequences, each counted once."""
        return self.num_pages - self.num_free - self.num_cached

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` free pages, now with one holder each; None and no change if fewer are free."""
        if count > self.num_free:
            return None
        if count == 0:
            return []
        bottom = self.num_free - count
        index = self._free[bottom : self.num_free][::-1]
        self._counts[index] = 1
        self.num_free = bottom
        pages: list[int] = index.tolist()
        return pages

    def share(self, pages: Pages) -> None:
        """Add a holder to pages that are used or cached. Raises ValueError for a free page."""
        index = np.asarray(pages, np.int32)
        counts = self._counts[index]
        was_cached = index[counts == 0]
        if not self._is_kept[was_cached].all():
            raise ValueError("a free page cannot be shared")
        self._counts[index] = counts + 1
        self.num_cached -= len(was_cached)

    def free(self, pages: Pages) -> PageArray:
        """Remove one holder from each page; return the pages left without a holder.

        Raises ValueError for a page without a holder: it would be allocated twice.
        """
        index = np.asarray(pages, np.int32)
        counts = self._counts[index] - 1
        if counts.min(initial=0) < 0:
            raise ValueError(f"page {index[counts < 0][0]} is freed twice")
        self._counts[index] = counts
        released: PageArray = index[counts == 0]
        is_kept = self._is_kept[released]
        self.num_cached += int(np.count_nonzero(is_kept))
        self._push(released[~is_kept])
        return released

    def keep(self, pages: Pages) -> None:
        """Keep pages for reuse after their last holder frees them. Raises ValueError if one is not held."""
        index = np.asarray(pages, np.int32)
        if not self._counts[index].all():
            raise ValueError("only a page that is held has a content to keep")
        self._is_kept[index] = True

    def drop(self, pages: Pages) -> None:
        """Free cached pages. Raises ValueError if one is not cached."""
        index = np.asarray(pages, np.int32)
        if self._counts[index].any() or not self._is_kept[index].all():
            raise ValueError("only cached pages can be dropped")
        self._is_kept[index] = False
        self.num_cached -= len(index)
        self._push(index)

    def is_held(self, pages: Pages) -> npt.NDArray[np.bool_]:
        """Return an array of the shape of `pages`, True for each page that has a holder."""
        held: npt.NDArray[np.bool_] = self._counts[np.asarray(pages, np.int32)] > 0
        return held

    def num_held(self, pages: Pages) -> int:
        """Return how many of these pages have a holder."""
        return int(np.count_nonzero(self._counts[np.asarray(pages, np.int32)]))

    def num_shared(self, pages: Pages) -> int:
        """Return how many of these pages have several holders."""
        return int(np.count_nonzero(self._counts[np.asarray(pages, np.int32)] > 1))

    def cells(self, max_cells: int) -> tuple[int, npt.NDArray[np.int64]]:
        """Count pages by state in up to `max_cells` cells of consecutive page numbers.

        Returns the pages per cell, which the last one may lack some of, and counts [num_cells, 3] of used
        pages with one holder, used pages with several, and cached ones. Takes 1 ms for a million pages.
        """
        per_cell = -(-self.num_pages // max_cells)
        is_held, is_shared = self._counts > 0, self._counts > 1
        states = np.stack((is_held & ~is_shared, is_shared, self._is_kept & ~is_held))
        starts = np.arange(0, self.num_pages, per_cell)
        return per_cell, np.add.reduceat(states, starts, axis=1, dtype=np.int64).T

    def _push(self, pages: PageArray) -> None:
        top = self.num_free + len(pages)
        self._free[self.num_free : top] = pages[::-1]
        self.num_free = top
