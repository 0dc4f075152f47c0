"""The mutable state of one continuation, owned by the loop thread."""

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto

from engine.outputs import FinishReason
from engine.request import RepetitionStop, Request
from engine.schedule import repetition


class SequenceStatus(Enum):
    """Where a sequence is. A preempted one is WAITING again."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class RequestChain:
    """Requests that follow each other as one piece of work, such as the steps of a search.

    Those behind the `first` one go on with its tokens. They wait in its place and end at its time limit, and
    no bound of the queue stops them. How long their outputs are says nothing of those of other requests.
    """

    first: "Sequence | None" = None


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way through the steps.

    Three counts describe it: `num_computed_tokens` (KV written by committed steps), `num_scheduled_tokens`
    (committed plus in flight) and `num_tokens` (known to the host). plan() moves only the second, commit()
    reconciles. A sampled token that is still in flight is not in `token_ids`: it lives in the state slot.

    `num_history_tokens` were known when the sequence took its slot: their KV is computed from token ids of
    the host, that of every later token from the slot's newest. `num_cached_tokens` of them need not be
    computed when it first starts. `draft_token_ids` are guesses of its next tokens, made while no row is in
    flight: its next row verifies them, and is alone in flight while it `is_verifying`. `final_token_ids` may
    end the sequence, and so may repetition, with `repetition_stop`. `rank` is its place in the order:
    smaller ones start earlier, and give their pages up later; with `arrival_seconds` it is that of the first
    one of its `chain`.
    """

    id: int
    request: Request
    seed: int
    arrival_seconds: float
    rank: float
    token_ids: "array[int]" = field(repr=False)
    num_prompt_tokens: int
    max_num_tokens: int
    final_token_ids: frozenset[int] = field(repr=False)
    repetition_stop: RepetitionStop | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_rows_in_flight: int = 0
    num_history_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    draft_token_ids: tuple[int, ...] = ()
    is_verifying: bool = False
    pages: "list[array[int]]" = field(default_factory=list, repr=False)
    first_columns: list[int] = field(default_factory=list, repr=False)
    num_unsent_columns: int = 0
    slot: int = -1
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    first_scheduled_seconds: float | None = None
    chain: RequestChain | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens the host knows."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens the host knows."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def ends_with_final_token(self) -> bool:
        """Whether its newest output token is one of those that may end it."""
        return self.num_output_tokens > 0 and self.token_ids[-1] in self.final_token_ids

    @property
    def is_repeating(self) -> bool:
        """Whether its newest output tokens repeat each other as often as is to end it."""
        stop, num_tokens = self.repetition_stop, self.num_output_tokens
        if stop is None or num_tokens < self.request.sampling.min_tokens:
            return False
        return repetition.is_repeating(self.token_ids, num_tokens, stop)

    @property
    def has_started(self) -> bool:
        """Whether any of its tokens has ever been scheduled."""
        return self.first_scheduled_seconds is not None

    @property
    def is_continuing(self) -> bool:
        """Whether it goes on with the work of another, which has started."""
        return self.chain is not None and self.chain.first is not self

    @property
    def is_finished(self) -> bool:
        """Whether it will produce nothing more."""
        return self.status is SequenceStatus.FINISHED
