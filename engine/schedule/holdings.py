"""What a running sequence holds: a state slot, and pages, its own or shared with others."""

from array import array
from typing import NamedTuple

import numpy as np

from engine.outputs import NO_PAGE
from engine.schedule.admission import Admission
from engine.schedule.groups import Groups
from engine.schedule.pages import NO_PAGES, PageArray, PagePool
from engine.schedule.prefix import PrefixCache
from engine.schedule.sequence import Sequence


class Found(NamedTuple):
    """Tokens of a waiting sequence that need not be computed: full pages to share, and one to copy."""

    pages: PageArray
    num_tokens: int
    leader: Sequence | None = None
    copied_page: int = NO_PAGE


class Holdings:
    """Gives slots and pages and takes them back; what was computed is found by those who come later.

    `num_queried_tokens` were looked up for sequences that started, `num_cached_tokens` of them found.
    """

    def __init__(
        self,
        pool: PagePool,
        prefix_cache: PrefixCache,
        admission: Admission,
        groups: Groups,
        *,
        num_slots: int,
        with_prefix_cache: bool,
    ) -> None:
        self.num_queried_tokens = 0
        self.num_cached_tokens = 0
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._admission = admission
        self._groups = groups
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._with_prefix_cache = with_prefix_cache

    @property
    def num_free_slots(self) -> int:
        """Sequences that could take a slot."""
        return len(self._free_slots)

    def allocate(self, count: int) -> list[int] | None:
        """Free pages, evicting cached ones for them; None if even those are not enough."""
        if count > self._pool.num_free:
            self._prefix_cache.evict(count - self._pool.num_free)
        return self._pool.allocate(count)

    def find(self, sequence: Sequence, step: int) -> Found:
        """Computed tokens of a waiting sequence. At least its last one is computed again, for its logits.

        And all of a prompt whose log-probabilities, or whose tokens' mean, are wanted.
        """
        page_size = self._pool.page_size
        if sequence.lacks_scores or sequence.request.pooling == "mean":
            return Found(NO_PAGES, 0)
        num_tokens = sequence.num_tokens - 1
        num_pages = num_tokens // page_size
        leader = self._groups.leader_of(sequence, step)
        if leader is not None:
            pages = np.array(leader.pages[:num_pages], np.int32)
            self._admission.opened(leader, pages)
            copied_page = leader.pages[num_pages] if num_tokens % page_size else NO_PAGE
            return Found(pages, num_tokens, leader, copied_page)
        if not self._is_cacheable(sequence):
            return Found(NO_PAGES, 0)
        pages = self._prefix_cache.match(sequence.request.cache_salt, sequence.token_ids, num_pages)
        return Found(pages, len(pages) * page_size)

    def take(self, sequence: Sequence, found: Found, step: int) -> tuple[int, int] | None:
        """Give a sequence that may start what it needs; returns (source, target) of a page to copy."""
        self._pool.share(found.pages)
        own_pages = self.allocate(self._pool.pages_for(sequence.num_tokens) - len(found.pages))
        assert own_pages is not None, "admission promised pages"
        sequence.slot = self._free_slots.pop()
        sequence.pages = array("i", found.pages.tobytes())
        sequence.pages.extend(own_pages)
        sequence.num_history_tokens = sequence.num_tokens
        sequence.num_scheduled_tokens = found.num_tokens
        sequence.num_computed_tokens = 0 if self._groups.start(sequence, found.leader) else found.num_tokens
        if not sequence.has_started:
            sequence.num_cached_tokens = found.num_tokens
            if not sequence.lacks_scores and (found.leader is not None or self._is_cacheable(sequence)):
                self.num_queried_tokens += sequence.num_prompt_tokens
                self.num_cached_tokens += found.num_tokens
        self._admission.started(sequence, step, found.pages)
        return None if found.copied_page == NO_PAGE else (found.copied_page, own_pages[0])

    def remember(self, sequence: Sequence, *, is_leaving: bool = False) -> None:
        """Let others find the full pages a sequence has computed."""
        # A stop string may have cut off computed tokens.
        num_pages = min(sequence.num_computed_tokens, sequence.num_tokens) // self._pool.page_size
        if num_pages and self._is_cacheable(sequence):
            new = self._prefix_cache.insert(
                sequence.request.cache_salt,
                sequence.token_ids,
                sequence.pages[:num_pages],
                is_leaving=is_leaving,
            )
            if not is_leaving:
                self._admission.opened(sequence, new)

    def give_back(self, sequence: Sequence) -> None:
        """Take back what a sequence holds; others find what it has computed, as long as there is room."""
        self.remember(sequence, is_leaving=True)
        self._admission.released(sequence, self._pool.free(sequence.pages))
        self._free_slots.append(sequence.slot)
        sequence.pages = array("i")
        sequence.slot = -1
        sequence.num_scheduled_tokens = 0
        sequence.num_computed_tokens = 0

    def _is_cacheable(self, sequence: Sequence) -> bool:
        """Whether its pages may be shared; not where the hidden states of every token are wanted."""
        request = sequence.request
        return self._with_prefix_cache and request.use_prefix_cache and request.pooling != "mean"
