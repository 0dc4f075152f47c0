"""Allocates what running sequences hold: a state slot, and pages, their own or shared with others."""

from array import array
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from engine.kv_layout import KVLayout, PageArray
from engine.outputs import NO_PAGE, GroupPages
from engine.schedule.admission import Admission
from engine.schedule.groups import Groups
from engine.schedule.pages import PagePool
from engine.schedule.prefix import PrefixCache
from engine.schedule.prefix_keys import PrefixKeys
from engine.schedule.readouts import ReadoutProgress
from engine.schedule.sequence import Sequence


class PrefixHit(NamedTuple):
    """Tokens of a waiting sequence that need no computing: full pages to share, partial ones to copy.

    `pages` [num_groups, num_columns], NO_PAGE where a window does not reach back; `copied_pages`, if any,
    has a page for each group.
    """

    pages: PageArray
    num_tokens: int
    leader: Sequence | None = None
    copied_pages: tuple[int, ...] = ()


class Allocator:
    """Allocates slots and pages and frees them; computed pages are found by sequences that come later.

    With `has_states` every sequence is computed from its first token: pages do not hold all of a prefix then.

    `num_queried_tokens` were looked up for sequences that started, `num_cached_tokens` of them found.
    """

    def __init__(
        self,
        pool: PagePool,
        layout: KVLayout,
        prefix_cache: PrefixCache,
        admission: Admission,
        groups: Groups,
        readouts: ReadoutProgress,
        *,
        num_slots: int,
        with_prefix_cache: bool,
        has_states: bool,
        short_context: int | None,
    ) -> None:
        self.num_queried_tokens = 0
        self.num_cached_tokens = 0
        self._pool = pool
        self._layout = layout
        self._prefix_cache = prefix_cache
        self._admission = admission
        self._groups = groups
        self._readouts = readouts
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._with_prefix_cache = with_prefix_cache and not has_states
        self._has_states = has_states
        self._prefix_keys = PrefixKeys()
        self._short_context = short_context
        self._no_hit = PrefixHit(np.empty((layout.num_groups, 0), np.int32), 0)

    @property
    def num_free_slots(self) -> int:
        """The number of sequences that can still get a slot."""
        return len(self._free_slots)

    def find(self, sequence: Sequence, step: int) -> PrefixHit:
        """Return the computed tokens of a waiting sequence that it may reuse.

        At least its last token is computed again, for its logits, and those its readouts need.
        """
        num_tokens = min(sequence.num_tokens - 1, self._readouts.first_unread(sequence))
        if num_tokens == 0 or self._has_states:
            return self._no_hit
        leader, is_long = self._groups.leader_of(sequence, step), self._is_long(sequence)
        has_same_keys = leader is not None and leader.is_long == is_long
        if leader is not None and has_same_keys and (hit := self._find_in(leader, num_tokens)) is not None:
            self._admission.on_pages_cached(leader, hit.pages)
            return hit
        if not self._is_cacheable(sequence):
            return self._no_hit
        page_size = self._pool.page_size
        namespace, key = _namespace(sequence, is_long), self._prefix_keys.key(sequence)
        pages = self._prefix_cache.match(namespace, key, num_tokens // page_size)
        hit = PrefixHit(pages, pages.shape[1] * page_size)
        return hit if self._fits_alone(sequence, hit) else self._no_hit

    def _find_in(self, leader: Sequence, num_tokens: int) -> PrefixHit | None:
        """Return the first `num_tokens` tokens of `leader` as a hit; None if a window left their pages."""
        num_columns, num_in_last = divmod(num_tokens, self._pool.page_size)
        first_columns = self._layout.first_columns(num_tokens)
        if any(left > first for left, first in zip(leader.first_columns, first_columns, strict=True)):
            return None
        pages = _columns(leader.pages, num_columns)
        for group, first in enumerate(first_columns):
            pages[group, :first] = NO_PAGE
        copied_pages = tuple(column[num_columns] for column in leader.pages) if num_in_last else ()
        return PrefixHit(pages, num_tokens, leader, copied_pages)

    def _fits_alone(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """Return False if the pool is too small for a hit and the rest of a long prompt."""
        layout = self._layout
        if not layout.window_groups:
            return True
        columns = layout.start_columns(sequence.num_tokens, layout.first_columns(hit.num_tokens))
        num_own = sum(columns) - hit.pages.size
        return num_own + int(np.count_nonzero(hit.pages >= 0)) <= self._pool.num_pages

    def allocate(self, sequence: Sequence, hit: PrefixHit, step: int) -> list[tuple[int, int]]:
        """Allocate slot and pages of a sequence that may start; return (source, target) of pages to copy."""
        layout = self._layout
        num_found_columns = hit.pages.shape[1]
        self._pool.share(layout.present(hit.pages))
        sequence.first_columns = layout.first_columns(hit.num_tokens)
        columns = layout.start_columns(sequence.num_tokens, sequence.first_columns)
        pages = self._allocate_pages(sum(columns) - num_found_columns * layout.num_groups)
        assert pages is not None, "admission promised pages"
        sequence.slot = self._free_slots.pop()
        sequence.pages = []
        start, first_own_pages = 0, []
        for group, num_columns in enumerate(columns):
            end = start + num_columns - num_found_columns
            first_own_pages.append(pages[start])
            sequence.pages.append(array("i", hit.pages[group].tobytes()))
            sequence.pages[group].extend(pages[start:end])
            start = end
        sequence.num_unsent_columns = min(columns)
        sequence.num_history_tokens = sequence.num_tokens
        sequence.is_long = self._is_long(sequence)
        sequence.num_scheduled_tokens = hit.num_tokens
        sequence.num_computed_tokens = 0 if self._groups.on_started(sequence, hit.leader) else hit.num_tokens
        if not sequence.has_started:
            sequence.num_cached_tokens = hit.num_tokens
            may_reuse = self._readouts.first_unread(sequence) > 0
            if may_reuse and (hit.leader is not None or self._is_cacheable(sequence)):
                self.num_queried_tokens += sequence.num_prompt_tokens
                self.num_cached_tokens += hit.num_tokens
        self._admission.on_started(sequence, step, hit.pages)
        return list(zip(hit.copied_pages, first_own_pages, strict=False))

    def grow(self, sequences: list[Sequence]) -> list[GroupPages] | None:
        """Allocate one more column for each sequence; return pages, or None and no change without room."""
        num_groups = self._layout.num_groups
        pages = self._allocate_pages(len(sequences) * num_groups)
        if pages is None:
            return None
        for group in range(num_groups):
            for sequence, page in zip(sequences, pages[group::num_groups], strict=True):
                sequence.pages[group].append(page)
        columns = [[(page,) for page in pages[group::num_groups]] for group in range(num_groups)]
        return list(zip(*columns, strict=True))

    def reserve(self, sequence: Sequence, num_tokens: int) -> int | None:
        """Allocate pages for `num_tokens` tokens of a decoding sequence; return the number of new columns.

        None without room, and where a window would hold more pages than admission counts.
        """
        num_new = self._layout.num_columns(num_tokens) - len(sequence.pages[0])
        if num_new <= 0:
            return 0
        if self._layout.exceeds_window(num_tokens, sequence.first_columns):
            return None
        pages = self._allocate_pages(num_new * self._layout.num_groups)
        if pages is None:
            return None
        for group, column in enumerate(sequence.pages):
            column.extend(pages[group * num_new : (group + 1) * num_new])
        sequence.num_unsent_columns += num_new
        return num_new

    def extend(self, sequence: Sequence, room: int) -> int:
        """Allocate what window groups need for the next `room` tokens of a prompt, without preempting.

        Returns how many tokens there are pages for: fewer than `room` where not enough pages are left.
        """
        layout = self._layout
        if not layout.window_groups:
            return room
        start = sequence.num_scheduled_tokens
        end = min(start + room, sequence.num_history_tokens + len(sequence.draft_token_ids))
        num_columns = layout.num_columns(end)
        num_complete = min(map(len, sequence.pages))
        sizes = [len(sequence.pages[group]) for group in layout.window_groups]
        num_available = self._pool.num_free + self._pool.num_cached
        while sum(max(0, num_columns - size) for size in sizes) > num_available:
            num_columns -= 1
        for group, size in zip(layout.window_groups, sizes, strict=True):
            pages = self._allocate_pages(max(0, num_columns - size))
            assert pages is not None, "free and cached pages can be allocated"
            sequence.pages[group].extend(pages)
        sequence.num_unsent_columns += min(map(len, sequence.pages)) - num_complete
        return max(0, min(end, num_columns * layout.page_size) - start)

    def unsent_pages(self, sequence: Sequence) -> GroupPages:
        """Return the pages in columns that no row of a plan has named yet, equally many in each group."""
        if not sequence.num_unsent_columns:
            return ()
        end = min(map(len, sequence.pages))
        start, sequence.num_unsent_columns = end - sequence.num_unsent_columns, 0
        return tuple(tuple(pages[start:end]) for pages in sequence.pages)

    def cache_pages(self, sequence: Sequence, *, is_leaving: bool = False) -> None:
        """Insert the sequence's full computed pages into the prefix cache."""
        # A stop string may have cut off computed tokens.
        num_columns = min(sequence.num_computed_tokens, sequence.num_tokens) // self._pool.page_size
        if num_columns and self._is_cacheable(sequence):
            new = self._prefix_cache.insert(
                _namespace(sequence, sequence.is_long),
                self._prefix_keys.key(sequence),
                _columns(sequence.pages, num_columns),
                is_leaving=is_leaving,
            )
            if not is_leaving:
                self._admission.on_pages_cached(sequence, new)

    def free_left_pages(self, sequence: Sequence) -> None:
        """Free the pages of a running sequence that no query after its computed tokens reads.

        They stay in the prefix cache as long as there is room.
        """
        first_columns = self._layout.first_columns(sequence.num_computed_tokens)
        if first_columns <= sequence.first_columns:
            return
        self.cache_pages(sequence)
        left: list[int] = []
        for group in self._layout.window_groups:
            pages = sequence.pages[group]
            for column in range(sequence.first_columns[group], first_columns[group]):
                left.append(pages[column])
                pages[column] = NO_PAGE
        sequence.first_columns = first_columns
        self._pool.free(left)
        self._admission.on_window_moved(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free slot and pages of a sequence; its computed full pages stay in the prefix cache."""
        self.cache_pages(sequence, is_leaving=True)
        pages = np.concatenate([np.asarray(group, np.int32) for group in sequence.pages])
        self._admission.on_pages_freed(sequence, self._pool.free(self._layout.present(pages)))
        self._free_slots.append(sequence.slot)
        sequence.pages = []
        sequence.num_unsent_columns = 0
        sequence.slot = -1
        sequence.num_scheduled_tokens = 0
        sequence.num_computed_tokens = 0

    def _allocate_pages(self, count: int) -> list[int] | None:
        """Return free pages, evicting cached ones if needed; None if both together are too few."""
        if count > self._pool.num_free:
            self._prefix_cache.evict(count - self._pool.num_free)
        return self._pool.allocate(count)

    def _is_long(self, sequence: Sequence) -> bool:
        """Return True for a sequence whose tokens known so far are too many for a short one."""
        return self._short_context is not None and sequence.num_tokens > self._short_context

    def _is_cacheable(self, sequence: Sequence) -> bool:
        """Return True if later requests may share the pages of a sequence."""
        return self._with_prefix_cache and sequence.request.use_prefix_cache


def _columns(pages: list["array[int]"], num_columns: int) -> PageArray:
    """Return the pages of the first columns, [num_groups, num_columns], as a copy."""
    table = np.empty((len(pages), num_columns), np.int32)
    for group, column in enumerate(pages):
        table[group] = column[:num_columns]
    return table


def _namespace(sequence: Sequence, is_long: bool) -> Hashable:
    """Return where the prefix cache has the pages of sequences like this one: long ones have other keys."""
    salt = sequence.request.cache_salt
    return (salt, "long") if is_long else salt
