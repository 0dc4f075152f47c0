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

from engine.schedule.pages import NO_PAGES, PageArray, PagePool, Pages

IntArray = npt.NDArray[np.int64]

UNCLAIMED = -1
ORPHANED = -2
NOBODY = -3
NO_OWNERS = np.empty(0, np.int64)


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


class _Claim(NamedTuple):
    """Shared pages as they are to be counted: `mine`, of which `owners` give up `counts`, and elsewhere."""

    mine: PageArray
    num_elsewhere: int
    owners: IntArray
    counts: IntArray


class Forecast:
    """The outlooks of all slots, and how many pages are held in all at the end of each.

    Nothing is sorted and nothing is summed up again. The future moves with the steps by itself; a start, an
    end or a new guess changes the sums at all ends, by one array operation.

    The owner of a page that others can find is the slot it is counted with. When an owner has ended although
    others hold the page, nobody knows who they are, and it is counted until it is free.
    """

    def __init__(self, pool: PagePool, num_slots: int) -> None:
        self._pool = pool
        self._is_running = np.zeros(num_slots, np.bool_)
        self._offset = np.zeros(num_slots, np.int64)  # tokens at step s: s + offset
        self._ready = np.zeros(num_slots, np.int64)
        self._end = np.zeros(num_slots, np.int64)
        self._num_elsewhere = np.zeros(num_slots, np.int64)  # pages it holds that are counted with others
        self._pages_at_end = np.zeros(num_slots, np.int64)  # of all together
        self._owner = np.full(pool.num_pages, UNCLAIMED, np.int32)
        self._num_orphaned = 0
        self._num_final = 0  # pages of each at its own end, summed up

    def start(self, slot: int, outlook: Outlook, shared: PageArray = NO_PAGES) -> None:
        """A sequence takes `slot`. It found the pages `shared`, with others or cached."""
        self._enter(slot, outlook, self._claim(slot, outlook, shared))

    def move(self, slot: int, outlook: Outlook, pages: Pages) -> None:
        """A better guess for a sequence that holds `pages`; an end that was guessed does not come earlier."""
        outlook = outlook._replace(end=max(outlook.end, int(self._end[slot])))
        if outlook.num_tokens - outlook.ready == self._offset[slot] and outlook.end == self._end[slot]:
            return  # all goes as expected
        has_shared = self._num_elsewhere[slot] > 0
        self._leave(slot)
        shared = np.asarray(pages, np.int32) if has_shared else NO_PAGES
        self._enter(slot, outlook, self._claim(slot, outlook, shared))

    def own(self, slot: int, pages: Pages) -> None:
        """Others can find these pages of the sequence in `slot` from now on."""
        index = np.asarray(pages, np.int32)
        self._owner[index[self._owner[index] == UNCLAIMED]] = slot

    def finish(self, slot: int, pages: Pages, let_go: PageArray) -> None:
        """The sequence in `slot` has freed `pages`, and nobody holds those in `let_go` any more."""
        self._leave(slot)
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
        # Between ends the sum only grows. Who is past its end gives its pages back after this step.
        ends, pages = [step], [self._pages_at(step, step)]
        if newcomer is not None:
            ends.append(newcomer.end)
            pages.append(self._pages_at(newcomer.end, step))
        ahead = np.flatnonzero(self._is_running & (self._end > step))
        all_ends = np.concatenate((self._end[ahead], ends))
        all_pages = np.concatenate((self._pages_at_end[ahead], pages))
        if newcomer is not None:
            all_pages += self._added_by(newcomer, self._claim(NOBODY, newcomer, shared), all_ends)
        return int(all_pages.max()) + self._num_orphaned

    def overdue(self, step: int) -> list[int]:
        """Slots whose expected end has passed."""
        slots: list[int] = np.flatnonzero(self._is_running & (self._end < step)).tolist()
        return slots

    def _enter(self, slot: int, outlook: Outlook, claim: _Claim) -> None:
        self._pages_at_end += self._added_by(outlook, claim, self._end)
        self._num_elsewhere[claim.owners] += claim.counts
        self._num_elsewhere[slot] = claim.num_elsewhere
        self._owner[claim.mine] = slot
        self._is_running[slot] = True
        self._offset[slot] = outlook.num_tokens - outlook.ready
        self._ready[slot] = outlook.ready
        self._end[slot] = outlook.end
        self._pages_at_end[slot] = self._pages_at(outlook.end)
        self._num_final += self._pool.pages_for(outlook.num_final_tokens)

    def _leave(self, slot: int) -> None:
        ready, end = int(self._ready[slot]), int(self._end[slot])
        outlook = Outlook(int(self._offset[slot]) + ready, ready, end)
        claim = _Claim(NO_PAGES, int(self._num_elsewhere[slot]), NO_OWNERS, NO_OWNERS)
        self._pages_at_end -= self._added_by(outlook, claim, self._end)
        self._num_elsewhere[slot] = 0
        self._is_running[slot] = False
        self._num_final -= self._pool.pages_for(outlook.num_final_tokens)

    def _added_by(self, outlook: Outlook, claim: _Claim, steps: IntArray) -> IntArray:
        """By how many pages a sequence changes the sums at each of `steps`."""
        tokens = np.maximum(steps, outlook.ready) + (outlook.num_tokens - outlook.ready)
        pages = -(-tokens // self._pool.page_size) - claim.num_elsewhere
        added = np.where(steps <= outlook.end, pages, 0)
        for owner, count in zip(claim.owners, claim.counts, strict=True):
            added -= np.where(steps <= self._end[owner], count, 0)
        return added

    def _pages_at(self, step: int, now: int = 0) -> int:
        """Pages held at `step`, without orphaned ones; whoever was to end before `now` ends now."""
        slots = np.flatnonzero(self._is_running & (np.maximum(self._end, now) >= step))
        tokens = self._offset[slots] + np.maximum(self._ready[slots], step)
        return int((-(-tokens // self._pool.page_size) - self._num_elsewhere[slots]).sum())

    def _claim(self, slot: int, outlook: Outlook, pages: PageArray) -> _Claim:
        """Of pages that it shares, a sequence owns those nobody else does or whose owners end earlier."""
        if not len(pages):
            return _Claim(NO_PAGES, 0, NO_OWNERS, NO_OWNERS)
        owners = self._owner[pages]
        is_others = (owners != UNCLAIMED) & (owners != slot)
        is_taken = is_others & (owners != ORPHANED) & (self._end[owners] < outlook.end)
        num_elsewhere = int(np.count_nonzero(is_others & ~is_taken))
        return _Claim(
            pages[~is_others | is_taken], num_elsewhere, *np.unique(owners[is_taken], return_counts=True)
        )
