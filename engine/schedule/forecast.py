"""Predicts the peak of pages held by the running sequences if each ends when it is expected to.

    pages                       ┌──┐ peak         Three sequences, one token more in every step.
      ▲              ┌──┐  ┌────┘  │              The pages of one are returned when it ends:
      │         ┌────┘  └──┘       │  ┌────┐      between two ends the sum only grows, so the
      │    ┌────┘   B ends         └──┘    │      peak is at one of the ends.
      │────┘                    C ends     │ A ends
      └──────────────────────────────────────▶ steps

This is the admission of LightLLM's router, published as the Past-Future scheduler (Gong et al., ASPLOS 2025),
with two changes. It counts pages instead of tokens. A page held by several sequences is counted once, for the
holder that is expected to end last. Pages of a sliding window are counted for each holder, because a sequence
replaces them by its own as its window moves on.
"""

from typing import NamedTuple

import numpy as np

from engine.kv_layout import IntArray, KVLayout, PageArray
from engine.schedule.pages import NO_PAGES, PagePool, Pages

UNCLAIMED = -1
OWNER_GONE = -2
NEWCOMER = -3
NO_OWNERS = np.empty(0, np.int64)


class LengthForecast(NamedTuple):
    """The expected length of a sequence; steps are counted from the start of the engine.

    It holds the pages of its `num_tokens` known tokens until step `ready`, which computes the last of them.
    Then it has one token more with every step, up to and including step `end`. In groups with a sliding
    window at least `window_pages` pages are counted: a prompt longer than the window holds more of them than
    an output.
    """

    num_tokens: int
    ready: int
    end: int
    window_pages: int = 0

    @property
    def num_final_tokens(self) -> int:
        """The number of tokens at step `end`."""
        return self.num_tokens + self.end - self.ready


class _Claim(NamedTuple):
    """How a sequence's shared pages are counted: `mine` for it, `num_elsewhere` for other sequences.

    `counts` of `mine` were counted for the slots `owners` before.
    """

    mine: PageArray
    num_elsewhere: int
    owners: IntArray
    counts: IntArray


class Forecast:
    """Keeps the expected length of each slot, and the pages held by all sequences at each expected end.

    The sums are never computed anew, and nothing is sorted: a start, an end or a new prediction updates the
    sums at all ends by one array operation, and a step changes none of them.

    The owner of a page that others can find is the slot it is counted for. When the owner ends while others
    hold the page, its holders are not known here: the page is counted until it is free. Pages of window
    groups have no owner: `shared` and the argument of own() are pages of full groups.
    """

    def __init__(self, pool: PagePool, layout: KVLayout, num_slots: int) -> None:
        self._pool = pool
        self._layout = layout
        self._is_running = np.zeros(num_slots, np.bool_)
        self._offset = np.zeros(num_slots, np.int64)  # tokens at step s: s + offset
        self._ready = np.zeros(num_slots, np.int64)
        self._end = np.zeros(num_slots, np.int64)
        self._window_pages = np.zeros(num_slots, np.int64)
        self._num_elsewhere = np.zeros(num_slots, np.int64)  # pages it holds that are counted with others
        self._pages_at_end = np.zeros(num_slots, np.int64)  # of all together
        self._owner = np.full(pool.num_pages, UNCLAIMED, np.int32)
        self._num_ownerless = 0  # pages whose owner is gone
        self._num_final = 0  # pages of each at its own end, summed up, each counted once

    def start(self, slot: int, length: LengthForecast, shared: PageArray = NO_PAGES) -> None:
        """Add a sequence in `slot` that shares the pages `shared`, held by others or cached."""
        self._enter(slot, length, self._claim(slot, length, shared))

    def move(self, slot: int, length: LengthForecast, pages: Pages) -> None:
        """Replace the expected length of a sequence that holds `pages` in full groups.

        Its end never moves to an earlier step, and its `window_pages` stay as they are.
        """
        end = max(length.end, int(self._end[slot]))
        length = length._replace(end=end, window_pages=int(self._window_pages[slot]))
        if length.num_tokens - length.ready == self._offset[slot] and length.end == self._end[slot]:
            return  # as expected
        has_shared = self._num_elsewhere[slot] > 0
        self._leave(slot)
        shared = np.asarray(pages, np.int32) if has_shared else NO_PAGES
        self._enter(slot, length, self._claim(slot, length, shared))

    def end_prompt(self, slot: int) -> None:
        """Set `window_pages` of a sequence to 0: its prompt has returned the pages its window left."""
        if self._window_pages[slot]:
            num_elsewhere = int(self._num_elsewhere[slot])
            length = self._leave(slot)._replace(window_pages=0)
            self._enter(slot, length, _Claim(NO_PAGES, num_elsewhere, NO_OWNERS, NO_OWNERS))

    def own(self, slot: int, pages: Pages) -> None:
        """Make `slot` the owner of those of `pages` that have none; others can find them from now on."""
        index = np.asarray(pages, np.int32)
        self._owner[index[self._owner[index] == UNCLAIMED]] = slot

    def finish(self, slot: int, pages: Pages, released: PageArray) -> None:
        """Remove a sequence that has freed `pages`, of which those in `released` have no holder left."""
        self._leave(slot)
        self._num_ownerless -= int(np.count_nonzero(self._owner[released] == OWNER_GONE))
        self._owner[released] = UNCLAIMED
        index = np.asarray(pages, np.int32)
        left = index[self._owner[index] == slot]
        self._owner[left] = OWNER_GONE
        self._num_ownerless += len(left)

    def bound(self, newcomer: LengthForecast | None = None, shared: PageArray = NO_PAGES) -> int:
        """Return an upper bound on the peak: all sequences at their final length at once. O(1)."""
        pages = self._num_final + self._num_ownerless
        if newcomer is not None:
            pages += self._final_pages(newcomer) - self._pool.num_held(shared)
        return pages

    def peak(self, step: int, newcomer: LengthForecast | None = None, shared: PageArray = NO_PAGES) -> int:
        """Return the most pages held at any step from `step` on, if `newcomer` starts and shares `shared`."""
        # Between two ends the sum only grows. A sequence past its end returns its pages after this step.
        ends, pages = [step], [self._pages_at(step, step)]
        if newcomer is not None:
            ends.append(newcomer.end)
            pages.append(self._pages_at(newcomer.end, step))
        ahead = np.flatnonzero(self._is_running & (self._end > step))
        all_ends = np.concatenate((self._end[ahead], ends))
        all_pages = np.concatenate((self._pages_at_end[ahead], pages))
        if newcomer is not None:
            all_pages += self._added_by(newcomer, self._claim(NEWCOMER, newcomer, shared), all_ends)
        return int(all_pages.max()) + self._num_ownerless

    def overdue(self, step: int) -> list[int]:
        """Return the slots whose expected end has passed."""
        slots: list[int] = np.flatnonzero(self._is_running & (self._end < step)).tolist()
        return slots

    def _enter(self, slot: int, length: LengthForecast, claim: _Claim) -> None:
        self._pages_at_end += self._added_by(length, claim, self._end)
        self._num_elsewhere[claim.owners] += claim.counts
        self._num_elsewhere[slot] = claim.num_elsewhere
        self._owner[claim.mine] = slot
        self._is_running[slot] = True
        self._offset[slot] = length.num_tokens - length.ready
        self._ready[slot] = length.ready
        self._end[slot] = length.end
        self._window_pages[slot] = length.window_pages
        self._pages_at_end[slot] = self._pages_at(length.end)
        self._num_final += self._final_pages(length) - claim.num_elsewhere - int(claim.counts.sum())

    def _leave(self, slot: int) -> LengthForecast:
        ready, end = int(self._ready[slot]), int(self._end[slot])
        length = LengthForecast(int(self._offset[slot]) + ready, ready, end, int(self._window_pages[slot]))
        claim = _Claim(NO_PAGES, int(self._num_elsewhere[slot]), NO_OWNERS, NO_OWNERS)
        self._pages_at_end -= self._added_by(length, claim, self._end)
        self._num_elsewhere[slot] = 0
        self._is_running[slot] = False
        self._num_final -= self._final_pages(length) - claim.num_elsewhere
        return length

    def _final_pages(self, length: LengthForecast) -> int:
        return int(self._layout.decode_pages(length.num_final_tokens, length.window_pages))

    def _added_by(self, length: LengthForecast, claim: _Claim, steps: IntArray) -> IntArray:
        """Return the number of pages that a sequence adds to the sums at each of `steps`."""
        tokens = np.maximum(steps, length.ready) + (length.num_tokens - length.ready)
        pages = self._layout.decode_pages(tokens, length.window_pages) - claim.num_elsewhere
        added = np.where(steps <= length.end, pages, 0)
        for owner, count in zip(claim.owners, claim.counts, strict=True):
            added -= np.where(steps <= self._end[owner], count, 0)
        return added

    def _pages_at(self, step: int, now: int = 0) -> int:
        """Return the pages held at `step`, without ownerless ones; those past their end last until `now`."""
        slots = np.flatnonzero(self._is_running & (np.maximum(self._end, now) >= step))
        tokens = self._offset[slots] + np.maximum(self._ready[slots], step)
        pages = self._layout.decode_pages(tokens, self._window_pages[slots])
        return int((pages - self._num_elsewhere[slots]).sum())

    def _claim(self, slot: int, length: LengthForecast, pages: PageArray) -> _Claim:
        """Return which shared pages a sequence owns: those without an owner or whose owner ends earlier."""
        if not len(pages):
            return _Claim(NO_PAGES, 0, NO_OWNERS, NO_OWNERS)
        owners = self._owner[pages]
        is_others = (owners != UNCLAIMED) & (owners != slot)
        is_taken = is_others & (owners != OWNER_GONE) & (self._end[owners] < length.end)
        num_elsewhere = int(np.count_nonzero(is_others & ~is_taken))
        return _Claim(
            pages[~is_others | is_taken], num_elsewhere, *np.unique(owners[is_taken], return_counts=True)
        )
