"""Counts the pages of a sequence in the KV groups of a model, of which some have a sliding window.

Each group has a page table of its own, with a column for every `page_size` tokens. A full group holds a page
in every column of a sequence. A window group holds none in the columns whose tokens no query will read again:

    group, window       columns of a sequence of 6 pages whose next query reads 2.5 pages back
    0, full             12  4  9  7  1 20
    1, 2.5 pages         -  -  - 13  5  8

All groups take their pages from one pool, and a page has the same size in all of them.
"""

from bisect import bisect_right
from typing import TypeVar

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
PageArray = npt.NDArray[np.int32]
Count = TypeVar("Count", int, IntArray)


class KVLayout:
    """Counts the pages of one sequence.

    `windows` has an entry for each group: how many tokens a query sees, its own included; 0: all of them.
    Pages are returned when a step is committed, while `run_ahead` later steps are planned, each with up to
    `token_budget` tokens of a prompt, or one token of a decoding sequence.
    """

    def __init__(
        self, windows: tuple[int, ...], page_size: int, *, token_budget: int, run_ahead: int
    ) -> None:
        self.windows = windows
        self.page_size = page_size
        self.full_groups = [group for group, window in enumerate(windows) if not window]
        self.window_groups = [group for group, window in enumerate(windows) if window]
        self._num_full = len(self.full_groups)
        self._run_ahead = run_ahead
        sizes = [windows[group] for group in self.window_groups]
        self._decode_columns = [self._most_columns(window, 1 + run_ahead) for window in sizes]
        self._prefill_columns = [
            self._most_columns(window, token_budget * (1 + run_ahead)) for window in sizes
        ]

    def _most_columns(self, window: int, num_uncommitted: int) -> int:
        """Return the most columns a window group holds with `num_uncommitted` tokens in planned steps."""
        return (window - 1 + num_uncommitted + 2 * (self.page_size - 1)) // self.page_size

    @property
    def num_groups(self) -> int:
        """Number of page tables of a sequence."""
        return len(self.windows)

    def in_full_groups(self, pages: PageArray) -> PageArray:
        """Return the pages of full groups in an array [num_groups, num_columns], as one row."""
        return pages[self.full_groups].ravel() if self.window_groups else pages.ravel()

    def present(self, pages: PageArray) -> PageArray:
        """Return the pages in an array [num_groups, num_columns] that are none of NO_PAGE, as one row."""
        return pages[pages >= 0] if self.window_groups else pages.ravel()

    def num_columns(self, num_tokens: int) -> int:
        """Return the number of columns for `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def first_columns(self, position: int) -> list[int]:
        """Return for each group the first column that queries from `position` on read."""
        return [max(0, position - w + 1) // self.page_size if w else 0 for w in self.windows]

    def start_columns(self, num_tokens: int, first_columns: list[int]) -> list[int]:
        """Return for each group the columns that have pages when a sequence of `num_tokens` tokens starts.

        Those of a window group reach from its entry in `first_columns` as far as the steps of a prompt need
        before they return pages; the others follow as the prompt is computed.
        """
        ends = [self.num_columns(num_tokens)] * len(self.windows)
        for group, most in zip(self.window_groups, self._prefill_columns, strict=True):
            ends[group] = min(ends[group], first_columns[group] + most)
        return ends

    def prefill_window_pages(self, num_tokens: int, first_columns: list[int]) -> int:
        """Return the most pages of window groups held until `num_tokens` tokens of a prompt are committed."""
        ends = self.start_columns(num_tokens + self._run_ahead, first_columns)
        return sum(ends[group] - first_columns[group] for group in self.window_groups)

    def exceeds_window(self, num_tokens: int, first_columns: list[int]) -> bool:
        """Return True if decode_pages() may be exceeded by `num_tokens` tokens from these columns on."""
        num_columns = self.num_columns(num_tokens)
        return any(
            num_columns - first_columns[group] > most
            for group, most in zip(self.window_groups, self._decode_columns, strict=True)
        )

    def decode_pages(self, num_tokens: Count, window_pages: Count | int = 0) -> Count:
        """Return an upper bound of the pages held with `num_tokens` tokens; it never falls as they grow.

        `window_pages` is the least to count in window groups.
        """
        columns: Count = -(-num_tokens // self.page_size)
        if not self.window_groups:
            return columns * self._num_full if self._num_full > 1 else columns
        in_windows = sum(np.minimum(columns, most) for most in self._decode_columns)
        pages: Count = columns * self._num_full + np.maximum(in_windows, window_pages)
        return pages

    def max_tokens(self, num_pages: int, limit: int) -> int:
        """Return the length of the longest sequence, at most `limit`, that can run alone in a pool."""

        def most_pages(num_columns: int) -> int:
            in_windows = sum(min(num_columns, most) for most in self._prefill_columns)
            return num_columns * self._num_full + in_windows

        columns = range(self.num_columns(limit) + 1)
        num_columns = bisect_right(columns, num_pages, key=most_pages) - 1
        return min(limit, num_columns * self.page_size)
