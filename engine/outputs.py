"""Frozen values that pass between the loop and the other threads.

loop --StepPlan--> device thread --StepOutput--> loop --DetokenizeJob--> detokenizer --TextDelta--> loop
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from engine.request import SamplingParams


class FinishReason(StrEnum):
    """Why a sequence ended. The values are the labels of `request_success_total{finished_reason}`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SlotInit(NamedTuple):
    """What a state slot starts from when a sequence takes it (first run, or resume after preemption)."""

    sampling: SamplingParams
    seed: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]


class DecodeRows(NamedTuple):
    """The rows of a step that continue decoding: one token each, the newest of its slot; all are sampled.

    Parallel columns, because a step has hundreds of them: row i computes the token at position `starts[i]`
    of sequence `sequence_ids[i]`, which runs in `slots[i]`. `new_pages[i]`, unless NO_PAGE, enters the slot's
    page table before the step, in the column of that position.
    """

    sequence_ids: list[int]
    slots: list[int]
    starts: list[int]
    new_pages: list[int]

    @classmethod
    def empty(cls) -> "DecodeRows":
        """No rows yet."""
        return cls([], [], [], [])


NO_PAGE = -1
NO_TOKEN = -1


class Row(NamedTuple):
    """A row whose tokens the host knows: a prompt or a piece of one, or the history of a resumed sequence.

    `token_ids` stand at positions from `start` on. `new_pages` continue the slot's page table; with `init`
    the slot starts anew and they are all its pages. With `sample` the logits of the last token are sampled,
    the token becomes the slot's newest and is returned.
    """

    sequence_id: int
    slot: int
    start: int
    token_ids: tuple[int, ...]
    sample: bool
    new_pages: tuple[int, ...] = ()
    init: SlotInit | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens this row computes."""
        return len(self.token_ids)


class StepPlan(NamedTuple):
    """One step of the device: the decode rows, then `chunks`, of which those with one token stand first.

    `page_copies` are pairs (source, target) of pages, copied before anything else.
    """

    step_id: int
    decode: DecodeRows
    chunks: tuple[Row, ...]
    num_tokens: int
    page_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_rows(self) -> int:
        """Sequences that take part."""
        return len(self.decode.slots) + len(self.chunks)

    @property
    def sequence_ids(self) -> list[int]:
        """Who takes part, in the order of the rows."""
        return [*self.decode.sequence_ids, *(row.sequence_id for row in self.chunks)]


class TokenLogprobs(NamedTuple):
    """Log-probability of a chosen token, and the most likely ones in its place, (id, logprob), best first.

    Log-softmax of the raw logits: before temperature, penalties, bias and masks.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class StepOutput(NamedTuple):
    """What a step computed: for each row of the plan the sampled tokens (none without `sample`).

    A token is NO_TOKEN where the model gave no finite probability to any. `logprobs`, None if no row asked
    for them, has an entry for each token of `tokens`, None where its row did not ask. `start_seconds` and
    `end_seconds` are the device's own times of the step on one clock.
    """

    step_id: int
    tokens: Sequence[tuple[int, ...]]
    start_seconds: float
    end_seconds: float
    logprobs: Sequence[tuple[TokenLogprobs | None, ...]] | None = None


class TextDelta(NamedTuple):
    """What became visible of one request since its last delta. Deltas join by concatenation."""

    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
