"""How many pages will the running sequences hold at most, if each ends when it is expected to?

    pages                       ┌──┐ peak         Three sequences, one token more in every step.
      ▲              ┌──┐  ┌────┘  │              The pages of one are given back when it ends:
      │         ┌────┘  └──┘       │  ┌────┐      between two ends the sum only grows, so the
      │    ┌────┘   B ends         └──┘    │      peak is at one of the ends.
      │────┘                    C ends     │ A ends
      └──────────────────────────────────────▶ steps

This is the admission of LightLLM's router, published as the Past-Future scheduler (Gong et al., ASPLOS 2025),
with pages for tokens, and pages that several sequences hold counted once: with the one that is expected to
end last.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.schedule.pages import PageArray, PagePool, Pages

IntArray = npt.NDArray[np.int64]

UNCLAIMED = -1
ORPHANED = -2
NO_PAGES = np.empty(0, np.int32)


class Outlook(NamedTuple):
    """What is expected of a sequence; steps are counted from the start of the engine.

    It holds the pages of its `num_tokens` known tokens until step `ready`, which computes the last of them.
    Then it has one token more with every step, up to and including step `end`.
    """

    num_tokens: int
    ready: int
    end: int

    @property
    def num_final_tokens(self) -> int:
        """Tokens at the end."""
        return self.num_tokens + self.end - self.ready


class Forecast:
    """The outlooks of all slots, and whom shared pages are counted with.

    The future moves with the steps by itself: only starts, ends and new guesses change anything.

    The owner of a page that others can find is the slot it is counted with. When an owner has ended although
    others hold the page, nobody knows who they are, and it is counted until it is free.
    """

    def __init__(self, pool: PagePool, num_slots: int) -> None:
        self._pool = pool
        self._is_running = np.zeros(num_slots, np.bool_)
        # One row more than slots: that of a newcomer whose effect is asked for.
        self._offset = np.zeros(num_slots + 1, np.int64)  # tokens at step s: s + offset
        self._ready = np.zeros(num_slots + 1, np.int64)
        self._end = np.zeros(num_slots + 1, np.int64)
        self._num_elsewhere = np.zeros(num_slots + 1, np.int64)  # pages it holds that are counted with others
        self._owner = np.full(pool.num_pages, UNCLAIMED, np.int32)
        self._num_orphaned = 0
        self._num_final = 0  # pages at the end, summed over the running ones

    def start(self, slot: int, outlook: Outlook, shared: PageArray = NO_PAGES) -> None:
        """A sequence takes `slot`. It found the pages `shared`, with others or cached."""
        self._is_running[slot] = True
        self._num_elsewhere[slot] = 0
        self._set(slot, outlook)
        self._num_final += self._final_pages(slot)
        if len(shared):
            self._owner[self._count_again(slot, shared, self._num_elsewhere)] = slot

    def move(self, slot: int, outlook: Outlook, pages: Pages) -> None:
        """A better guess for a sequence that holds `pages`; an end that was guessed does not come earlier."""
        self._num_final -= self._final_pages(slot)
        self._set(slot, outlook._replace(end=max(outlook.end, int(self._end[slot]))))
        self._num_final += self._final_pages(slot)
        if self._num_elsewhere[slot]:
            index = np.asarray(pages, np.int32)
            self._owner[self._count_again(slot, index, self._num_elsewhere)] = slot

    def own(self, slot: int, pages: Pages) -> None:
        """Others can find these pages of the sequence in `slot` from now on."""
        index = np.asarray(pages, np.int32)
        self._owner[index[self._owner[index] == UNCLAIMED]] = slot

    def finish(self, slot: int, pages: Pages, let_go: PageArray) -> None:
        """The sequence in `slot` has freed `pages`, and nobody holds those in `let_go` any more."""
        self._num_final -= self._final_pages(slot)
        self._is_running[slot] = False
        self._num_orphaned -= int(np.count_nonzero(self._owner[let_go] == ORPHANED))
        self._owner[let_go] = UNCLAIMED
        index = np.asarray(pages, np.int32)
        left = index[self._owner[index] == slot]
        self._owner[left] = ORPHANED
        self._num_orphaned += len(left)

    def bound(self, newcomer: Outlook | None = None, shared: PageArray = NO_PAGES) -> int:
        """Pages if nobody left before all have reached their ends: never below the peak; quickly found."""
        pool = self._pool
        pages = pool.num_used + self._num_final - pool.num_references
        if newcomer is not None:
            pages += pool.pages_for(newcomer.num_final_tokens) - pool.num_held(shared)
        return pages

    def peak(self, step: int, newcomer: Outlook | None = None, shared: PageArray = NO_PAGES) -> int:
        """Most pages held at any step from `step` on; with a newcomer, if it started and found `shared`."""
        slots = np.flatnonzero(self._is_running)
        num_elsewhere = self._num_elsewhere
        if newcomer is not None:
            spare = len(self._is_running)
            self._set(spare, newcomer)
            slots = np.append(slots, spare)
            if len(shared):
                num_elsewhere = num_elsewhere.copy()
                self._count_again(spare, shared, num_elsewhere)
        if not len(slots):
            return self._num_orphaned
        # Row k: at the k-th last end, when the k that end later, or then, are there.
        slots = slots[np.argsort(-self._end[slots])]
        ends = np.maximum(self._end[slots], step)
        is_ready = self._ready[slots] <= step
        pages = _pages_of_growing(self._offset[slots], ends, is_ready, self._pool.page_size)
        positions = np.flatnonzero(~is_ready)
        late = slots[positions]
        tokens = self._offset[late] + np.maximum(ends[:, np.newaxis], self._ready[late])
        is_there = positions <= np.arange(len(slots))[:, np.newaxis]
        pages += np.where(is_there, -(-tokens // self._pool.page_size), 0).sum(axis=1)
        pages -= np.cumsum(num_elsewhere[slots])
        return int(pages.max()) + self._num_orphaned

    def overdue(self, step: int) -> list[int]:
        """Slots whose expected end has passed."""
        is_overdue = self._is_running & (self._end[:-1] < step)
        slots: list[int] = np.flatnonzero(is_overdue).tolist()
        return slots

    def _set(self, row: int, outlook: Outlook) -> None:
        self._offset[row] = outlook.num_tokens - outlook.ready
        self._ready[row] = outlook.ready
        self._end[row] = outlook.end

    def _final_pages(self, slot: int) -> int:
        return self._pool.pages_for(int(self._offset[slot] + self._end[slot]))

    def _count_again(self, row: int, pages: PageArray, num_elsewhere: IntArray) -> PageArray:
        """Update `num_elsewhere` for a holder of `pages`; returns those that are counted with it from now on.

        They are the ones nobody else has found, and those of owners that end earlier.
        """
        owners = self._owner[pages]
        is_others = (owners != UNCLAIMED) & (owners != row)
        is_taken = is_others & (owners != ORPHANED) & (self._end[owners] < self._end[row])
        np.add.at(num_elsewhere, owners[is_taken], 1)
        num_elsewhere[row] = np.count_nonzero(is_others & ~is_taken)
        mine: PageArray = pages[~is_others | is_taken]
        return mine


def _pages_of_growing(
    offset: IntArray, ends: IntArray, is_growing: npt.NDArray[np.bool_], page_size: int
) -> IntArray:
    """Pages of the first k + 1 at `ends[k]`, for every k: the sum of ceil((offset + ends[k]) / page_size).

    ceil((offset + end) / p) is q + Q, and one more where r + R >= p, with q, r the quotient and remainder of
    offset + p - 1, and Q, R those of end. So counting remainders replaces n * n divisions.
    """
    quotients, remainders = np.divmod(offset + page_size - 1, page_size)
    end_quotients, end_remainders = np.divmod(ends, page_size)
    pages: IntArray = np.cumsum(np.where(is_growing, quotients, 0)) + end_quotients * np.cumsum(is_growing)
    if page_size > 1:
        counts = np.zeros((len(ends), page_size + 1), np.int32)
        growing = np.flatnonzero(is_growing)
        counts[growing, remainders[growing]] = 1
        # counts[k, r]: how many of the first k + 1 have a remainder of at least r
        counts = counts.cumsum(axis=0)[:, ::-1].cumsum(axis=1)[:, ::-1]
        pages += counts[np.arange(len(ends)), page_size - end_remainders]
    return pages
