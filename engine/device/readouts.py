"""Recipes: compute the readouts of `engine/readouts.py`, one class for each in RECIPES."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from engine.device.staging import to_host, upload
from engine.outputs import PromptLogprobColumns, RowReadout, StepPlan
from engine.readouts import MAX_LOGPROBS, PooledHidden, PromptLogprobs, Readout, RewardScore
from kernels.logprobs import top_logprobs
from models.decoder import Decoder

# Logits at a time: those of a whole prompt would be gigabytes (8192 tokens, 128k logits: 4.2 GB).
SLICE_BYTES = 64 * 2**20


class PlacedReadout(NamedTuple):
    """A readout of a row: the row's index in the plan, its slot, and the readout's number in the row."""

    row: int
    slot: int
    number: int
    readout: RowReadout


class Pending(NamedTuple):
    """Tensors of one kind, and the function that makes their host copies one result for each readout."""

    tensors: Sequence[torch.Tensor]
    results: Callable[[Sequence[np.ndarray]], Sequence[Any]]


class Recipe(Protocol):
    """Computes all readouts of one kind in a step. It may keep state per slot, 0 to `num_slots` - 1."""

    def __init__(self, model: Decoder, num_slots: int) -> None: ...

    def compute(self, placed: Sequence[PlacedReadout], hidden: torch.Tensor) -> Pending:
        """Return the results of `placed`, whose tokens' states follow each other in `hidden`.

        hidden [num_tokens, hidden_size]: `readout.num_tokens` rows for each, at least one. Must not wait for
        the device. Tensors of results have a dtype that numpy knows, so not bfloat16. A result is None where
        a later row of the sequence returns it; results may be views of one array.
        """


class PromptLogprobsRecipe:
    """Log-softmax of the logits at each token, of the prompt's next token and of the most likely ones."""

    def __init__(self, model: Decoder, num_slots: int) -> None:
        self._model = model

    def compute(self, placed: Sequence[PlacedReadout], hidden: torch.Tensor) -> Pending:
        ids = [token_id for one in placed for token_id in one.readout.next_token_ids]
        [next_token_ids] = upload(hidden.device, (np.array(ids, np.int64),))
        columns = prompt_logprobs(self._model, hidden, next_token_ids)

        def results(arrays: Sequence[np.ndarray]) -> list[PromptLogprobColumns]:
            logprobs, top, top_ids, ranks = (np.concatenate(arrays[column::4]) for column in range(4))
            found, end = [], 0
            for one in placed:
                assert isinstance(one.readout.readout, PromptLogprobs)
                start, end, num_top = end, end + one.readout.num_tokens, one.readout.readout.num_top
                rows = slice(start, end)
                found.append(
                    PromptLogprobColumns(
                        logprobs[rows], top[rows, :num_top], top_ids[rows, :num_top], ranks[rows]
                    )
                )
            return found

        return Pending(columns, results)


def prompt_logprobs(model: Decoder, hidden: torch.Tensor, next_token_ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the log-probability and rank of each of `next_token_ids` int64 [num_tokens] after `hidden`.

    hidden [num_tokens, hidden_size], at least one token. The tensors are those of one slice of tokens after
    another: logprobs fp32 [n], the most likely ones fp32 and their ids int64 [n, MAX_LOGPROBS], best first,
    ranks int64 [n].
    """
    vocab_size = model.spec.vocab_size
    size = max(1, SLICE_BYTES // (4 * vocab_size))
    num_top = min(MAX_LOGPROBS, vocab_size)
    columns: list[torch.Tensor] = []
    for states, tokens in zip(hidden.split(size), next_token_ids.split(size), strict=True):
        logits = model.logits(states)
        ranks = (logits >= logits.gather(1, tokens.unsqueeze(1))).sum(-1)
        columns += (*top_logprobs(logits, tokens, num_top), ranks)
    return columns


class PooledHiddenRecipe:
    """The mean of a prompt's hidden states, or the last one.

    Sums are fp64 [num_slots + 1, hidden_size], so that it makes no difference to the fp32 result where a
    prompt was cut. They exist from the first mean on.
    """

    def __init__(self, model: Decoder, num_slots: int) -> None:
        self._shape = (num_slots + 1, model.spec.hidden_size)
        self._sums: torch.Tensor | None = None

    def compute(self, placed: Sequence[PlacedReadout], hidden: torch.Tensor) -> Pending:
        vectors: list[torch.Tensor] = []
        sums: list[tuple[int, torch.Tensor]] = []
        pieces = hidden.split([one.readout.num_tokens for one in placed])
        for one, states in zip(placed, pieces, strict=True):
            request = one.readout.readout
            assert isinstance(request, PooledHidden)
            vector = states[-1]
            if request.pooling == "mean":
                end = one.readout.start + one.readout.num_tokens
                total = self._sum(one.slot, states, is_first=one.readout.start == 0)
                sums.append((one.slot, total))
                vector = total / end
            if one.readout.is_last:
                vectors.append(vector.float())
        tensors = [torch.stack(vectors)] if vectors else []
        if self._sums is not None:
            for slot, total in sums:  # at last: when memory runs out before, all of it can be computed again
                self._sums[slot] = total

        def results(arrays: Sequence[np.ndarray]) -> list[np.ndarray | None]:
            whole = iter(arrays[0] if arrays else ())
            return [next(whole) if one.readout.is_last else None for one in placed]

        return Pending(tensors, results)

    def _sum(self, slot: int, states: torch.Tensor, *, is_first: bool) -> torch.Tensor:
        """Return the sum, fp64 [hidden_size], of a prompt's states including those of its next piece."""
        if self._sums is None:
            self._sums = torch.zeros(self._shape, dtype=torch.float64, device=states.device)
        total = states.sum(0, dtype=torch.float64)
        return total if is_first else total + self._sums[slot]


class RewardScoreRecipe:
    """The score head applied to the last token of each prompt."""

    def __init__(self, model: Decoder, num_slots: int) -> None:
        self._head = model.score

    def compute(self, placed: Sequence[PlacedReadout], hidden: torch.Tensor) -> Pending:
        return Pending([self._head(hidden)], lambda arrays: list(arrays[0]))


RECIPES: dict[type[Readout], type[Recipe]] = {
    PromptLogprobs: PromptLogprobsRecipe,
    PooledHidden: PooledHiddenRecipe,
    RewardScore: RewardScoreRecipe,
}


class StepReadouts(NamedTuple):
    """The readouts of a step by kind, and the indices in the step of the tokens they read, in that order."""

    by_kind: dict[type[Readout], list[PlacedReadout]]
    token_indices: np.ndarray


NO_READOUTS = StepReadouts({}, np.zeros(0, np.int64))


def readouts_of(plan: StepPlan, first_tokens: np.ndarray) -> StepReadouts:
    """Return the readouts of a plan. first_tokens int64 [num_rows]: index of each row's first token."""
    if not plan.readouts:
        return NO_READOUTS
    by_kind: dict[type[Readout], list[PlacedReadout]] = {}
    for row, readouts in plan.readouts.items():
        for number, readout in enumerate(readouts):
            one = PlacedReadout(row, plan.slots[row], number, readout)
            by_kind.setdefault(type(readout.readout), []).append(one)
    indices = [
        np.arange(one.readout.num_tokens) + (first_tokens[one.row] + one.readout.start - plan.starts[one.row])
        for placed in by_kind.values()
        for one in placed
    ]
    return StepReadouts(by_kind, np.concatenate((np.zeros(0, np.int64), *indices)))


class ReadoutsOnHost(NamedTuple):
    """Results on their way to the host."""

    pending: Sequence[
        tuple[list[PlacedReadout], list[torch.Tensor], Callable[[Sequence[np.ndarray]], Sequence[Any]]]
    ] = ()

    def by_row(self) -> dict[int, tuple[Any, ...]]:
        """Return the results by row of the plan, once the device has written them."""
        rows: dict[int, dict[int, Any]] = {}
        for placed, tensors, results in self.pending:
            found = results([tensor.numpy() for tensor in tensors])
            for one, result in zip(placed, found, strict=True):
                rows.setdefault(one.row, {})[one.number] = result
        return {row: tuple(found[number] for number in sorted(found)) for row, found in rows.items()}


class Readouts:
    """The recipes of all kinds, made when a step first needs them."""

    def __init__(self, model: Decoder, num_slots: int) -> None:
        self._model = model
        self._num_slots = num_slots
        self._recipes: dict[type[Readout], Recipe] = {}

    def compute(self, step: StepReadouts, hidden: torch.Tensor) -> ReadoutsOnHost:
        """Compute a step's readouts, of `hidden` [len(token_indices), hidden_size], and copy them."""
        pending = []
        sizes = [sum(one.readout.num_tokens for one in placed) for placed in step.by_kind.values()]
        for (kind, placed), states in zip(step.by_kind.items(), hidden.split(sizes), strict=True):
            if kind not in self._recipes:
                self._recipes[kind] = RECIPES[kind](self._model, self._num_slots)
            tensors, results = self._recipes[kind].compute(placed, states)
            pending.append((placed, [to_host(tensor) for tensor in tensors], results))
        return ReadoutsOnHost(pending)
