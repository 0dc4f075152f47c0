"""The pool of KV pages: which are free, and who pays for the others.

A page is `page_size` consecutive tokens of keys and values of every layer. The pool deals in page numbers
only; the tensors behind them belong to the device thread.
"""

from collections.abc import Iterable


class PagePool:
    """Hands out page numbers `0 .. num_pages - 1`.

    Freed pages are handed out again first (last in, first out): they are the ones still in the CPU's cache,
    and untouched memory stays untouched.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages: {num_pages=}, {page_size=}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_used = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages held by sequences."""
        return self.num_pages - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Number of pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages, or None (and nothing taken) when fewer are free."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            self._is_used[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back. Raises ValueError for a page that nobody holds: it would be handed out twice."""
        for page in reversed(list(pages)):
            if not self._is_used[page]:
                raise ValueError(f"page {page} is freed twice")
            self._is_used[page] = 0
            self._free.append(page)
