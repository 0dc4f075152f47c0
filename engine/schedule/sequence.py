"""The mutable state of a request on its way through the steps, owned by the loop thread."""

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto

from engine.outputs import NO_TOKEN, FinishReason
from engine.request import RepetitionStop, Request
from engine.schedule import repetition


class SequenceStatus(Enum):
    """The status of a sequence. A preempted one is WAITING again."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class RequestChain:
    """Requests that continue each other's tokens as one piece of work, such as the steps of a beam search.

    Those after the `first` one have its rank and its time limit, and no limit of the queue refuses them. The
    lengths of their outputs are not used to predict those of other requests.
    """

    first: "Sequence | None" = None


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way through the steps.

    Three counts describe it: `num_computed_tokens` (KV written by committed steps), `num_scheduled_tokens`
    (committed plus in flight) and `num_tokens` (known to the host). plan() moves only the second, commit()
    reconciles. A sampled token that is still in flight is not in `token_ids`: it lives in the state slot.

    `num_history_tokens` were known when the sequence took its slot. Their KV is computed from token ids of
    the host, that of every later token from the last sampled token of the slot. `num_cached_tokens` were
    found in the prefix cache at the first start. `draft_token_ids` are guesses of the next tokens, made while
    no row is in flight: the next row verifies them, and no other row is in flight while `is_verifying`.

    With LongRoPE `is_long` is set if it took its slot with more tokens than a short sequence has.

    A token of `final_token_ids` ends the sequence, and so does repetition, with `repetition_stop`. `rank` is
    its place in the order: sequences with smaller ranks start earlier and are preempted later. In a `chain`
    `rank` and `arrival_seconds` are those of the first request.
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
    is_long: bool = False
    pages: "list[array[int]]" = field(default_factory=list, repr=False)
    first_columns: list[int] = field(default_factory=list, repr=False)
    num_unsent_columns: int = 0
    slot: int = -1
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    first_scheduled_seconds: float | None = None
    chain: RequestChain | None = None

    @classmethod
    def of(
        cls,
        sequence_id: int,
        request: Request,
        *,
        seed: int,
        now: float,
        rank: float,
        eos_token_ids: frozenset[int],
        chain: RequestChain | None = None,
    ) -> "Sequence":
        """Return a new sequence for `request`; the first one of `chain` becomes its `first`."""
        sampling = request.sampling
        num_prompt_tokens = len(request.prompt_token_ids)
        first = None if chain is None else chain.first
        sequence = cls(
            id=sequence_id,
            request=request,
            seed=seed,
            arrival_seconds=now if first is None else first.arrival_seconds,
            rank=rank if first is None else first.rank,
            token_ids=_prompt_token_ids(request, first),
            num_prompt_tokens=num_prompt_tokens,
            max_num_tokens=num_prompt_tokens + sampling.max_tokens,
            final_token_ids=sampling.stop_token_ids
            | frozenset((NO_TOKEN,))
            | (frozenset() if sampling.ignore_eos else eos_token_ids),
            repetition_stop=sampling.repetition_stop,
            chain=chain,
        )
        if chain is not None and first is None:
            chain.first = sequence
        return sequence

    @property
    def num_tokens(self) -> int:
        """The number of prompt and output tokens that the host knows."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """The number of output tokens that the host knows."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def ends_with_final_token(self) -> bool:
        """True if the newest output token is one of `final_token_ids`."""
        return self.num_output_tokens > 0 and self.token_ids[-1] in self.final_token_ids

    @property
    def is_repeating(self) -> bool:
        """True if the newest output tokens repeat often enough for `repetition_stop`."""
        stop, num_tokens = self.repetition_stop, self.num_output_tokens
        if stop is None or num_tokens < self.request.sampling.min_tokens:
            return False
        return repetition.is_repeating(self.token_ids, num_tokens, stop)

    @property
    def has_started(self) -> bool:
        """True if any of its tokens has ever been scheduled."""
        return self.first_scheduled_seconds is not None

    @property
    def is_continuing(self) -> bool:
        """True if it is in a chain and not the first request of it."""
        return self.chain is not None and self.chain.first is not self

    @property
    def is_finished(self) -> bool:
        """True if it has ended and gains no more tokens."""
        return self.status is SequenceStatus.FINISHED

    def end_reasons(self) -> tuple[FinishReason, int | str | None] | None:
        """Return the finish reason and stop reason if the newest token ends the sequence, else None."""
        sampling, token_id = self.request.sampling, self.token_ids[-1]
        if token_id == NO_TOKEN:
            return FinishReason.ERROR, None
        if token_id in self.final_token_ids and self.num_output_tokens > sampling.min_tokens:
            return FinishReason.STOP, token_id if token_id in sampling.stop_token_ids else None
        if self.is_repeating:
            return FinishReason.STOP, RepetitionStop.REASON
        if self.num_tokens >= self.max_num_tokens:
            return FinishReason.LENGTH, None
        return None


def _prompt_token_ids(request: Request, first: Sequence | None) -> "array[int]":
    """Return the prompt of a request, copying the tokens it shares with the `first` of its chain."""
    if first is None:
        return array("i", request.prompt_token_ids)
    num_common = first.num_prompt_tokens
    return first.token_ids[:num_common] + array("i", request.prompt_token_ids[num_common:])
