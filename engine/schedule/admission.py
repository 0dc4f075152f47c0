"""Admission: refuses requests that can never run, and decides which waiting sequence may start now.

A sequence starts when its pages and those that all running sequences will need fit into the pool. The number
of pages depends on the lengths of the outputs. `overcommit` sets how optimistically these are predicted:

    0           every output has max_tokens tokens, and none ends before all have them:
                no sequence is ever preempted, and most of the pool stays empty
    in between  an output has the length within which outputs end with probability 1 - overcommit; the
                predicted peak and a reserve must fit, and the reserve shrinks as overcommit grows
    1           nothing is predicted: a sequence starts if it fits now

Predictions are wrong in both directions. Most errors cancel out, and the reserve covers the rest; that takes
far fewer pages than predicting a long length for each output (benchmarks.simulate). A sequence that outlives
its prediction gets a new one. If too many do, the latest one is preempted.
"""

import numpy as np

from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.kv_layout import KVLayout, PageArray
from engine.request import Request
from engine.schedule.forecast import Forecast, LengthForecast
from engine.schedule.lengths import OutputLengths
from engine.schedule.pages import NO_PAGES, PagePool
from engine.schedule.sequence import Sequence

RESERVE_TOKENS = 32  # for each running sequence, times 1 - overcommit


class Admission:
    """Refuses requests that can never run, and predicts the pages that the running sequences will need.

    The caller counts the steps. A step computes at most `token_budget` tokens of a prompt. A sequence returns
    its pages when its last step is committed, and `run_ahead` more steps are planned before that. Pages are
    arrays [num_groups, num_columns], NO_PAGE where a group needs none.
    """

    def __init__(
        self,
        pool: PagePool,
        layout: KVLayout,
        *,
        max_running: int,
        max_model_len: int,
        token_budget: int,
        overcommit: float,
        run_ahead: int,
    ) -> None:
        self._pool = pool
        self._layout = layout
        self._max_tokens = layout.max_tokens(pool.num_pages, max_model_len)
        self._token_budget = token_budget
        self._overcommit = overcommit
        self._quantile = 1.0 - overcommit
        self._reserve_tokens = RESERVE_TOKENS * (1.0 - overcommit) if overcommit > 0 else 0.0
        self._run_ahead = run_ahead
        self._forecast = Forecast(pool, layout, max_running)
        self._lengths = OutputLengths()
        self._running: dict[int, Sequence] = {}
        self._num_changes = 0
        self._refused = (-1, -1)

    def check(self, request: Request) -> None:
        """Raise InvalidRequest or ContextLengthExceeded if the request can never run."""
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens == 0:
            raise InvalidRequest("The prompt is empty: at least one token is needed.", "prompt")
        if request.sampling.max_tokens < 0:
            raise InvalidRequest("A number of output tokens must not be negative.", "max_tokens")
        total = num_prompt_tokens + request.sampling.max_tokens
        if total > self._max_tokens:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self._max_tokens} tokens. However, you "
                f"requested {total} tokens ({num_prompt_tokens} in the prompt, "
                f"{request.sampling.max_tokens} in the completion)."
            )

    def is_refused(self, sequence: Sequence, step: int) -> bool:
        """Return True if may_start() refused this sequence and nothing has changed since then."""
        for slot in self._forecast.overdue(step):
            running = self._running[slot]
            length = self._length(running, step, running.num_history_tokens, running.num_scheduled_tokens)
            self._forecast.move(slot, length, self._full_pages(running))
            self._num_changes += 1
        return self._refused == (sequence.id, self._num_changes)

    def may_start(self, sequence: Sequence, step: int, found: PageArray, num_found_tokens: int) -> bool:
        """Return True if a waiting sequence may start with step `step`, sharing the pages `found`."""
        pool, layout = self._pool, self._layout
        first_columns = layout.first_columns(num_found_tokens)
        num_new = sum(layout.start_columns(sequence.num_tokens, first_columns))
        num_new -= found.shape[1] * layout.num_groups
        pages = layout.present(found)
        num_revived = len(pages) - pool.num_held(pages)
        if num_new <= pool.num_free + pool.num_cached - num_revived:
            newcomer = self._length_at_start(sequence, step, num_found_tokens)
            shared = self._layout.in_full_groups(found)
            reserve = layout.num_groups * layout.num_columns(int(self._reserve_tokens * len(self._running)))
            limit = pool.num_pages - reserve
            if not self._running or self._overcommit == 1 or self._forecast.bound(newcomer, shared) <= limit:
                return True
            if self._overcommit > 0 and self._forecast.peak(step, newcomer, shared) <= limit:
                return True
        self._refused = (sequence.id, self._num_changes)
        return False

    def on_started(self, sequence: Sequence, step: int, found: PageArray) -> None:
        """Count a sequence that got its slot and its pages, of which it shares `found`; no row is planned."""
        self._num_changes += 1
        self._running[sequence.slot] = sequence
        length = self._length_at_start(sequence, step, sequence.num_scheduled_tokens)
        self._forecast.start(sequence.slot, length, self._layout.in_full_groups(found))

    def on_prefill_done(self, sequence: Sequence, step: int) -> None:
        """Update the prediction of a sequence that decodes after step `step`, the last one of its prefill."""
        self._num_changes += 1
        length = self._length(sequence, step + 1, sequence.num_history_tokens, sequence.num_scheduled_tokens)
        self._forecast.move(sequence.slot, length, self._full_pages(sequence))

    def on_pages_cached(self, sequence: Sequence, pages: PageArray) -> None:
        """Count pages of a sequence that later sequences can find from now on."""
        self._num_changes += bool(pages.size)
        self._forecast.own(sequence.slot, self._layout.in_full_groups(pages))

    def on_window_moved(self, sequence: Sequence) -> None:
        """Count the pages a sequence has freed because no window reaches back to them any more."""
        self._num_changes += 1
        if sequence.num_computed_tokens >= sequence.num_history_tokens:
            self._forecast.end_prompt(sequence.slot)

    def on_pages_freed(self, sequence: Sequence, released: PageArray) -> None:
        """Remove a sequence that has freed all its pages; those in `released` have no holder left."""
        self._num_changes += 1
        del self._running[sequence.slot]
        self._forecast.finish(sequence.slot, self._full_pages(sequence), released)

    def on_ended(self, num_output_tokens: int, *, is_complete: bool) -> None:
        """Add the length of an ended output to the statistics; not `is_complete`: it was cut off there."""
        self._lengths.observe(num_output_tokens, is_complete=is_complete)

    def predicted_peak(self, step: int) -> int:
        """Return the predicted peak of held pages if no other sequence starts."""
        if self._overcommit == 1:
            return self._pool.num_used
        return self._forecast.peak(step) if self._overcommit > 0 else self._forecast.bound()

    def _length_at_start(self, sequence: Sequence, step: int, num_found_tokens: int) -> LengthForecast:
        """Predict the length of a sequence that starts with `step`, its first tokens found in the cache."""
        layout, num_tokens = self._layout, sequence.num_tokens
        window_pages = layout.prefill_window_pages(num_tokens, layout.first_columns(num_found_tokens))
        length = self._length(sequence, step, num_tokens, num_found_tokens)
        return length._replace(window_pages=window_pages)

    def _length(self, sequence: Sequence, step: int, num_history: int, num_scheduled: int) -> LengthForecast:
        """Predict the length of a sequence with `num_scheduled` of its history before `step`."""
        sampling = sequence.request.sampling
        length = sampling.max_tokens
        if 0 < self._overcommit < 1 and not sampling.ignore_eos:
            length = min(length, self._lengths.guess(sequence.num_output_tokens, self._quantile))
        # The KV of an output's last token is not computed, unless by a step planned before the end was known.
        num_final = sequence.num_prompt_tokens + length - 1
        if self._overcommit > 0:
            num_final += self._run_ahead
        # A sequence may hold pages for drafts beyond its tokens.
        num_columns = max(map(len, sequence.pages), default=0)
        num_paged = (num_columns - 1) * self._pool.page_size + 1
        num_history = max(num_history, num_paged)
        if num_scheduled < num_history:
            ready = step - 1 - (num_scheduled - num_history) // self._token_budget
            return LengthForecast(num_history, ready, ready + max(0, num_final - num_history))
        most = max(sequence.num_prompt_tokens, sequence.max_num_tokens - 1)
        num_tokens = max(min(num_scheduled + 1, most), num_paged)
        return LengthForecast(num_tokens, step, step + max(0, num_final - num_tokens))

    def _full_pages(self, sequence: Sequence) -> PageArray:
        """Return the pages that a sequence holds in full groups."""
        pages = [np.asarray(sequence.pages[group], np.int32) for group in self._layout.full_groups]
        return np.concatenate((NO_PAGES, *pages))
