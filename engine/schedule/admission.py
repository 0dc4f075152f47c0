"""May this request ever run, and may it start now?

A sequence starts when the pages that all running ones will need fit into the pool together with its own. How
many that is depends on how long the outputs become, which `overcommit` says how to guess:

    0           every output takes its max_tokens, and nobody gives pages back before all have them:
                nothing is ever preempted, and most of the pool stays empty
    in between  the length within which outputs like this one end with probability 1 - overcommit; the
                predicted peak must fit, and a reserve that is smaller, too, the larger overcommit is
    1           nothing is foreseen: what fits now, starts

Guesses are wrong in both directions. Much of that cancels out, and the reserve takes up the rest, which is
far cheaper than guessing each output to be long (benchmarks.simulate). Whoever is longer than was guessed
gets a new guess. When too many are, the latest is preempted.
"""

from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.request import Request
from engine.schedule.forecast import Forecast, Outlook
from engine.schedule.lengths import OutputLengths
from engine.schedule.pages import PageArray, PagePool, Pages
from engine.schedule.sequence import Sequence

RESERVE_TOKENS = 32  # for each running sequence, times 1 - overcommit


class Admission:
    """Refuses what can never run, and foresees what the running sequences will need.

    Steps are counted by the caller; `token_budget` tokens of a prompt are computed in one at most. Pages are
    given back when the last step of a sequence has been committed, after `run_ahead` others were planned.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_running: int,
        max_model_len: int,
        token_budget: int,
        overcommit: float,
        run_ahead: int,
    ) -> None:
        self._pool = pool
        self._max_tokens = min(max_model_len, pool.num_pages * pool.page_size)
        self._token_budget = token_budget
        self._overcommit = overcommit
        self._quantile = 1.0 - overcommit
        self._reserve_tokens = RESERVE_TOKENS * (1.0 - overcommit) if overcommit > 0 else 0.0
        self._run_ahead = run_ahead
        self._forecast = Forecast(pool, max_running)
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
        """Whether may_start() said no to this sequence and nothing has changed since then."""
        for slot in self._forecast.overdue(step):
            running = self._running[slot]
            outlook = self._outlook(running, step, running.num_history_tokens, running.num_scheduled_tokens)
            self._forecast.move(slot, outlook, running.pages)
            self._num_changes += 1
        return self._refused == (sequence.id, self._num_changes)

    def may_start(self, sequence: Sequence, step: int, found: PageArray, num_found_tokens: int) -> bool:
        """Whether a waiting sequence may start with step `step`, on the pages `found` for its tokens."""
        pool = self._pool
        num_new = pool.pages_for(sequence.num_tokens) - len(found)
        num_revived = len(found) - pool.num_held(found)
        if num_new <= pool.num_free + pool.num_cached - num_revived:
            newcomer = self._outlook(sequence, step, sequence.num_tokens, num_found_tokens)
            limit = pool.num_pages - pool.pages_for(int(self._reserve_tokens * len(self._running)))
            if not self._running or self._overcommit == 1 or self._forecast.bound(newcomer, found) <= limit:
                return True
            if self._overcommit > 0 and self._forecast.peak(step, newcomer, found) <= limit:
                return True
        self._refused = (sequence.id, self._num_changes)
        return False

    def started(self, sequence: Sequence, step: int, found: PageArray) -> None:
        """A sequence has taken its slot and its pages, among them those `found`; nothing is scheduled yet."""
        self._num_changes += 1
        self._running[sequence.slot] = sequence
        outlook = self._outlook(sequence, step, sequence.num_history_tokens, sequence.num_scheduled_tokens)
        self._forecast.start(sequence.slot, outlook, found)

    def ready(self, sequence: Sequence, step: int) -> None:
        """Step `step` computes the last of the tokens a sequence started with: it decodes from now on."""
        self._num_changes += 1
        outlook = self._outlook(
            sequence, step + 1, sequence.num_history_tokens, sequence.num_scheduled_tokens
        )
        self._forecast.move(sequence.slot, outlook, sequence.pages)

    def opened(self, sequence: Sequence, pages: Pages) -> None:
        """Others can find these pages of a sequence from now on."""
        self._num_changes += bool(len(pages))
        self._forecast.own(sequence.slot, pages)

    def released(self, sequence: Sequence, let_go: PageArray) -> None:
        """A sequence has freed its pages, and nobody holds those in `let_go` any more."""
        self._num_changes += 1
        del self._running[sequence.slot]
        self._forecast.finish(sequence.slot, sequence.pages, let_go)

    def ended(self, num_output_tokens: int, *, is_complete: bool) -> None:
        """An output has this length, or was cut off there."""
        self._lengths.observe(num_output_tokens, is_complete=is_complete)

    def predicted_peak(self, step: int) -> int:
        """Pages that will be held at most, if nothing else starts."""
        if self._overcommit == 1:
            return self._pool.num_used
        return self._forecast.peak(step) if self._overcommit > 0 else self._forecast.bound()

    def _outlook(self, sequence: Sequence, step: int, num_history: int, num_scheduled: int) -> Outlook:
        """What to expect of a sequence, of whose `num_history` tokens `num_scheduled` come before `step`."""
        sampling = sequence.request.sampling
        length = sampling.max_tokens
        if 0 < self._overcommit < 1 and not sampling.ignore_eos:
            length = min(length, self._lengths.guess(sequence.num_output_tokens, self._quantile))
        # The last token of an output is not computed, unless by a step that ran ahead of it.
        num_final = sequence.num_prompt_tokens + length - 1
        if self._overcommit > 0:
            num_final += self._run_ahead
        if num_scheduled < num_history:
            ready = step - 1 - (num_scheduled - num_history) // self._token_budget
            return Outlook(num_history, ready, ready + max(0, num_final - num_history))
        most = max(sequence.num_prompt_tokens, sequence.max_num_tokens - 1)
        num_tokens = min(num_scheduled + 1, most)
        return Outlook(num_tokens, step, step + max(0, num_final - num_tokens))
