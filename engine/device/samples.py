"""What was sampled, on its way from the device to a StepOutput."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from engine.device.constraints import Outcome
from engine.device.sampler import Logprobs, Sampled
from engine.device.scores import Scores
from engine.outputs import Row, StepOutput, StepPlan, TokenLogprobs, TokenScores


@dataclass(frozen=True)
class HostSamples:
    """Samples on their way to the host; `num_logprobs`: how many most likely tokens each wants told.

    `scores`: of the known tokens that are scored, in slices, row after row. `outcome`: of the masks that
    `num_constrained` rows waited for; the rows that it ended have no token. `pooled` fp32
    [len(pooled_ids), hidden_size]: the vectors of these sequences.
    """

    tokens: torch.Tensor
    logprobs: Logprobs | None = None
    num_logprobs: Sequence[int | None] = ()
    scores: Sequence[Scores] = ()
    outcome: Outcome = field(default_factory=Outcome)
    num_constrained: int = 0
    pooled_ids: Sequence[int] = ()
    pooled: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        samples: Sampled,
        num_rows: int,
        num_logprobs: Sequence[int | None],
        scores: Sequence[Scores] = (),
    ) -> "HostSamples":
        """Copy the first `num_rows`, without waiting; log-probabilities only where one is wanted."""
        tokens = _to_host(samples.tokens[:num_rows])
        on_host = [Scores(*map(_to_host, part)) for part in scores]
        if not num_logprobs or samples.logprobs is None:
            return cls(tokens, scores=on_host)
        logprobs = Logprobs(*(_to_host(tensor[:num_rows]) for tensor in samples.logprobs))
        return cls(tokens, logprobs, num_logprobs, on_host)

    def with_pooled(self, ids: Sequence[int], vectors: torch.Tensor) -> "HostSamples":
        """These samples, and vectors [len(ids), hidden_size] beside them."""
        return replace(self, pooled_ids=ids, pooled=_to_host(vectors))


def _told(logprobs: Logprobs, num_logprobs: Sequence[int | None]) -> list[TokenLogprobs | None]:
    """What has reached the host, with as many most likely tokens as each row wants; None for none at all."""
    wanted = [(row, count) for row, count in enumerate(num_logprobs) if count is not None]
    rows, width = [row for row, _ in wanted], max(count for _, count in wanted)
    told: list[TokenLogprobs | None] = [None] * len(num_logprobs)
    for (row, count), logprob, values, ids in zip(
        wanted,
        logprobs.chosen.numpy()[rows].tolist(),
        logprobs.top.numpy()[rows, :width].tolist(),
        logprobs.top_ids.numpy()[rows, :width].tolist(),
        strict=True,
    ):
        told[row] = TokenLogprobs(logprob, tuple(zip(ids[:count], values[:count], strict=True)))
    return told


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, where the device will have written once its stream gets there."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def step_output(plan: StepPlan, samples: HostSamples, start_seconds: float, end_seconds: float) -> StepOutput:
    """Samples, one for each decode row and for each chunk with `sample`, as the tokens of each row."""
    is_sampled = [True] * len(plan.decode.slots) + [row.sample for row in plan.chunks]
    sampled: list[tuple[int, ...]] = [(token_id,) for token_id in samples.tokens.tolist()]
    for index in samples.outcome.ended:
        sampled[index] = ()
    values = iter(sampled)
    tokens = [next(values) if there else () for there in is_sampled]
    logprobs = None
    if samples.logprobs is not None:
        told: list[tuple[TokenLogprobs | None, ...]] = [
            (entry,) for entry in _told(samples.logprobs, samples.num_logprobs)
        ]
        for index in samples.outcome.ended:
            told[index] = ()
        entries = iter(told)
        logprobs = [next(entries) if there else () for there in is_sampled]
    scores = _scores(plan.chunks, samples.scores) if samples.scores else None
    pooled = None
    if samples.pooled is not None:
        pooled = dict(zip(samples.pooled_ids, samples.pooled.numpy(), strict=True))
    problems: dict[int, str] = {}
    if samples.outcome.problems:
        ids = [sequence_id for sequence_id, there in zip(plan.sequence_ids, is_sampled, strict=True) if there]
        problems = {ids[index]: problem for index, problem in samples.outcome.problems.items()}
    return StepOutput(
        plan.step_id,
        tokens,
        start_seconds,
        end_seconds,
        logprobs,
        scores,
        samples.num_constrained,
        pooled,
        problems,
    )


def _scores(chunks: Sequence[Row], slices: Sequence[Scores]) -> list[TokenScores | None]:
    """The scores of each chunk."""
    columns = [np.concatenate([part.numpy() for part in parts]) for parts in zip(*slices, strict=True)]
    scores: list[TokenScores | None] = []
    end = 0
    for row in chunks:
        if row.scored is None:
            scores.append(None)
            continue
        start, end = end, end + len(row.scored.token_ids)
        logprobs, top, top_ids, ranks = (column[start:end] for column in columns)
        num_top = row.scored.num_top
        scores.append(TokenScores(logprobs, top[:, :num_top], top_ids[:, :num_top], ranks))
    return scores
