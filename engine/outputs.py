"""Immutable values that pass between the loop and the other threads.

loop --StepPlan--> device thread --StepOutput--> loop --DetokenizeJob--> detokenizer --TextDelta--> loop
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from engine.constraint import Constraint
from engine.readouts import Readout
from engine.request import SamplingParams


class FinishReason(StrEnum):
    """The reason why a sequence ended; a label value of `request_success_total{finished_reason}`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SlotInit(NamedTuple):
    """The initial content of a state slot, for a sequence that starts or resumes after preemption."""

    sampling: SamplingParams
    seed: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    constraints: tuple[Constraint, ...] = ()


NO_PAGE = -1
NO_TOKEN = -1

_EMPTY: Mapping[int, Any] = MappingProxyType({})

# Pages of one sequence in the same columns of its page tables, for each KV group.
GroupPages = tuple[tuple[int, ...], ...]


class RowReadout(NamedTuple):
    """The part of a readout that one row computes.

    It uses the final hidden states of `num_tokens` tokens of the row, from position `start` on.
    `next_token_ids` are the prompt's tokens after each of them (one fewer when the prompt ends with the last
    one). `is_last`: no later row computes a part of this readout.
    """

    readout: Readout
    start: int
    num_tokens: int
    next_token_ids: tuple[int, ...]
    is_last: bool


class Row(NamedTuple):
    """Consecutive tokens of one sequence that a step computes, from position `start` on.

    Decode, prefill, a chunk of a prompt, a resumed history and drafts to be verified differ in numbers only.
    `token_ids` are the row's tokens. If empty, the row has one token, the slot's last sampled one, which the
    host may not know yet. The logits of the last `num_logits` tokens are sampled. With several, the last
    `num_logits - 1` tokens are drafts: the row returns sampled tokens up to and including the first one that
    differs from the draft at its position.

    `new_pages` extend the slot's page table in every KV group; with `init` the slot is reset and they are all
    its pages. `readouts` are the results that the row returns beside tokens.
    """

    sequence_id: int
    slot: int
    start: int
    token_ids: tuple[int, ...] = ()
    num_logits: int = 1
    new_pages: GroupPages = ()
    init: SlotInit | None = None
    readouts: tuple[RowReadout, ...] = ()


class StepPlan(NamedTuple):
    """One step of the device: its rows (see Row) as parallel columns, because a step has hundreds of them.

    Row i belongs to sequence `sequence_ids[i]` in `slots[i]` and computes `query_lens[i]` tokens from
    position `starts[i]` on. Rows without token ids come first, then other rows of one token, then longer
    ones. The keys of the mappings are row numbers; most rows of a decode step are in no mapping.

    `page_copies` are pairs (source, target) of pages, copied before the rows are computed.
    """

    step_id: int
    sequence_ids: list[int]
    slots: list[int]
    starts: list[int]
    query_lens: list[int]
    num_logits: list[int]
    token_ids: dict[int, tuple[int, ...]]
    new_pages: dict[int, GroupPages]
    inits: dict[int, SlotInit]
    readouts: dict[int, tuple[RowReadout, ...]]
    page_copies: list[tuple[int, int]]

    @classmethod
    def of(cls, step_id: int, rows: Iterable[Row], page_copies: Iterable[tuple[int, int]] = ()) -> "StepPlan":
        """Return a plan of rows given in any order."""
        plan = cls(step_id, [], [], [], [], [], {}, {}, {}, {}, list(page_copies))
        plan.extend(rows)
        return plan

    def extend(self, rows: Iterable[Row]) -> None:
        """Append rows, in the order of a plan; it must have no row of several tokens yet."""
        for row in sorted(rows, key=lambda row: (bool(row.token_ids), len(row.token_ids) > 1)):
            index = len(self.slots)
            self.sequence_ids.append(row.sequence_id)
            self.slots.append(row.slot)
            self.starts.append(row.start)
            self.query_lens.append(len(row.token_ids) or 1)
            self.num_logits.append(row.num_logits)
            if row.token_ids:
                self.token_ids[index] = row.token_ids
            if row.new_pages:
                self.new_pages[index] = row.new_pages
            if row.init is not None:
                self.inits[index] = row.init
            if row.readouts:
                self.readouts[index] = row.readouts

    @property
    def num_rows(self) -> int:
        """The number of rows, one per sequence."""
        return len(self.slots)

    @property
    def num_decode_rows(self) -> int:
        """The number of rows without token ids: their one token is the slot's last sampled one."""
        return len(self.slots) - len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the step computes."""
        return sum(self.query_lens)


class TokenLogprobs(NamedTuple):
    """The logprob of a chosen token, and `top`: (id, logprob) of the most likely ones, best first.

    Log-softmax of the raw logits: before temperature, penalties, bias and masks. `rank`, of prompt tokens
    only: the number of tokens with at least its probability, itself included.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None


class PromptLogprobColumns(NamedTuple):
    """TokenLogprobs of consecutive prompt tokens, as columns: a prompt has thousands.

    `logprobs` fp32 and `ranks` int64 [num_tokens]; `top` fp32 and `top_ids` int64 [num_tokens, num_top], best
    first.
    """

    logprobs: np.ndarray
    top: np.ndarray
    top_ids: np.ndarray
    ranks: np.ndarray

    def each(self) -> Iterator[TokenLogprobs]:
        """Yield the tokens one by one, so that no single call holds the GIL for long."""
        columns = (self.logprobs.tolist(), self.top, self.top_ids, self.ranks.tolist())
        for logprob, values, ids, rank in zip(*columns, strict=True):
            yield TokenLogprobs(logprob, tuple(zip(ids.tolist(), values.tolist(), strict=True)), rank)


class StepOutput(NamedTuple):
    """The results of a step: for each row of the plan its new tokens, 0 to `num_logits` of them.

    A sampled row without tokens has ended: its constraints allow none, and it may end. A token is NO_TOKEN
    where the model gave no finite probability to any. `logprobs` has an entry for each token of `tokens`,
    None where its row did not request one; it is None if no row did. `start_seconds` and `end_seconds` are
    the device's own times of the step on one clock. `num_constrained` rows waited for a mask. `readouts`, by
    row: a result for each readout of the row, None where a later row returns it. `problems`, by sequence id:
    the reason why its constraints allow no token; empty for an internal fault.
    """

    step_id: int
    tokens: Sequence[tuple[int, ...]]
    start_seconds: float
    end_seconds: float
    logprobs: Sequence[tuple[TokenLogprobs | None, ...]] | None = None
    num_constrained: int = 0
    readouts: Mapping[int, tuple[Any, ...]] = _EMPTY
    problems: Mapping[int, str] = _EMPTY


class TokenPiece(NamedTuple):
    """A token of the vocabulary and its bytes, which may be a part of a character."""

    token_id: int
    data: bytes
    is_special: bool


class OutputToken(NamedTuple):
    """A token of the output or the prompt, for requests that return every token.

    `offset`: characters of the output (or prompt) before the one its first byte belongs to. `logprob`, `top`
    and `rank` as in TokenLogprobs; None and empty if not requested, and for the first token of a prompt.
    Tokens without text are not shown: the one that ended the output, those of a stop string, special ones.
    `is_hidden`: a special token that is not shown and did not end the output.
    """

    piece: TokenPiece
    offset: int
    logprob: float | None
    top: tuple[tuple[TokenPiece, float], ...]
    is_shown: bool
    rank: int | None = None
    is_hidden: bool = False

    @property
    def is_listed(self) -> bool:
        """True if logprobs list the token: it is part of the output, shown or not."""
        return self.is_shown or self.is_hidden


class TextDelta(NamedTuple):
    """The output of one request that became visible since its last delta. Deltas join by concatenation.

    `tokens`, for requests that `return_tokens`, are those whose last character is in `text`, and in the last
    delta all that remain: all deltas together have as many as `num_tokens` counts. `prompt_tokens`, in the
    first delta of a request with `prompt_logprobs`, are those of the prompt.
    """

    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    tokens: tuple[OutputToken, ...] = ()
    prompt_tokens: tuple[OutputToken, ...] = ()

    @classmethod
    def joined(cls, deltas: Sequence["TextDelta"]) -> "TextDelta":
        """Return consecutive deltas of a request, at least one, as one."""
        if len(deltas) == 1:
            return deltas[0]
        return cls(
            "".join([delta.text for delta in deltas]),
            sum(delta.num_tokens for delta in deltas),
            deltas[-1].finish_reason,
            deltas[-1].stop_reason,
            tuple(token for delta in deltas for token in delta.tokens),
            deltas[0].prompt_tokens,
        )

    @property
    def lists_tokens(self) -> bool:
        """True if logprobs list any of its tokens."""
        return any(token.is_listed for token in self.tokens)


def logprobs_by_sequence(plan: StepPlan, output: StepOutput) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Return the logprobs of a step's tokens, by id, of the sequences that requested them."""
    if output.logprobs is None:
        return {}
    return {
        sequence_id: tuple(entry for entry in row if entry is not None)
        for sequence_id, row in zip(plan.sequence_ids, output.logprobs, strict=True)
        if row and row[0] is not None
    }
