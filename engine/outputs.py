"""Frozen values that pass between the loop and the other threads.

loop --StepPlan--> device thread --StepOutput--> loop --DetokenizeJob--> detokenizer --TextDelta--> loop
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from engine.constraint import Constraint
from engine.request import Pooling, SamplingParams


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
    constraints: tuple[Constraint, ...] = ()


# Pages of one sequence: for each KV group the pages of the same columns of its page table.
GroupPages = tuple[tuple[int, ...], ...]


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


class Scored(NamedTuple):
    """Tokens of a prompt whose log-probabilities are wanted, and of `num_top` most likely ones in each place.

    `token_ids` follow the tokens at positions from `start` on.
    """

    start: int
    token_ids: tuple[int, ...]
    num_top: int


class Pool(NamedTuple):
    """A row of a sequence whose hidden states are pooled; with `is_last` the vector is whole after it."""

    pooling: Pooling
    is_last: bool


class Row(NamedTuple):
    """A row whose tokens the host knows: a prompt or a piece of one, or the history of a resumed sequence.

    `token_ids` stand at positions from `start` on. `new_pages` continue the slot's page table; with `init`
    the slot starts anew and they are all its pages. With `sample` the logits of the last token are sampled,
    the token becomes the slot's newest and is returned. The logits of the tokens in front of the `scored`
    ones say how likely those are. With `pool` the hidden states enter the slot's vector.
    """

    sequence_id: int
    slot: int
    start: int
    token_ids: tuple[int, ...]
    sample: bool
    new_pages: tuple[int, ...] = ()
    init: SlotInit | None = None
    scored: Scored | None = None
    pool: Pool | None = None

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

    Log-softmax of the raw logits: before temperature, penalties, bias and masks. `rank`, told of the tokens
    of a prompt: how many tokens are as likely as it at least, itself among them.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None


class TokenScores(NamedTuple):
    """The same of many tokens, as columns: those of a prompt are thousands.

    `logprobs` fp32 and `ranks` int64 [num_tokens]; `top` fp32 and `top_ids` int64 [num_tokens, num_top], best
    first.
    """

    logprobs: np.ndarray
    top: np.ndarray
    top_ids: np.ndarray
    ranks: np.ndarray

    def each(self) -> Iterator[TokenLogprobs]:
        """One after the other: no call holds the GIL for long."""
        columns = (self.logprobs.tolist(), self.top, self.top_ids, self.ranks.tolist())
        for logprob, values, ids, rank in zip(*columns, strict=True):
            yield TokenLogprobs(logprob, tuple(zip(ids.tolist(), values.tolist(), strict=True)), rank)


class StepOutput(NamedTuple):
    """What a step computed: for each row of the plan the sampled tokens (none without `sample`).

    None for a sampled row, too, when its constraints let nothing follow and it may end: then it has ended.
    A token is NO_TOKEN where the model gave no finite probability to any. `logprobs`, None if no row asked
    for them, has an entry for each token of `tokens`, None where its row did not ask. `scores`, None if no
    chunk asked for them, are those of the `scored` tokens of each chunk, None where it has none.
    `start_seconds` and `end_seconds` are the device's own times of the step on one clock. `num_constrained`
    rows waited for a mask. `pooled`: by sequence id the vectors that are whole, fp32 [hidden_size].
    `problems`: by sequence id why it is not known what may follow; empty for a fault of ours.
    """

    step_id: int
    tokens: Sequence[tuple[int, ...]]
    start_seconds: float
    end_seconds: float
    logprobs: Sequence[tuple[TokenLogprobs | None, ...]] | None = None
    scores: Sequence[TokenScores | None] | None = None
    num_constrained: int = 0
    pooled: Mapping[int, np.ndarray] | None = None
    problems: Mapping[int, str] = MappingProxyType({})


class TokenPiece(NamedTuple):
    """A token of the vocabulary and the bytes it stands for, which may be a part of a character."""

    token_id: int
    data: bytes
    is_special: bool


class OutputToken(NamedTuple):
    """A token of the output or the prompt, told to those who ask for every one.

    `offset`: characters of the output (or prompt) before the one its first byte belongs to. `logprob`, `top`
    and `rank` as in TokenLogprobs; None and empty where nobody asked, and for the first token of a prompt.
    Not shown is what leaves no text: the token that ended the output, those of a stop string, special ones.
    """

    piece: TokenPiece
    offset: int
    logprob: float | None
    top: tuple[tuple[TokenPiece, float], ...]
    is_shown: bool
    rank: int | None = None


class TextDelta(NamedTuple):
    """What became visible of one request since its last delta. Deltas join by concatenation.

    `tokens`, for requests that `return_tokens`, are those whose last character is in `text`, and at the end
    all that are left: joined, there are as many as `num_tokens` counts. `prompt_tokens`, in the first delta
    of a request with `prompt_logprobs`, are those of the prompt.
    """

    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    tokens: tuple[OutputToken, ...] = ()
    prompt_tokens: tuple[OutputToken, ...] = ()

    @property
    def shows_tokens(self) -> bool:
        """Whether any of its tokens is shown."""
        return any(token.is_shown for token in self.tokens)


def logprobs_by_sequence(plan: StepPlan, output: StepOutput) -> dict[int, tuple[TokenLogprobs, ...]]:
    """The log-probabilities of a step's tokens, of the sequences that asked for them."""
    if output.logprobs is None:
        return {}
    return {
        sequence_id: tuple(told for told in row if told is not None)
        for sequence_id, row in zip(plan.sequence_ids, output.logprobs, strict=True)
        if row and row[0] is not None
    }
