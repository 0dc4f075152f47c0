"""Copies samples to pinned memory and builds the StepOutput of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.device.readouts import ReadoutsOnHost
from engine.device.sampler import Logprobs, Sampled
from engine.device.staging import to_host
from engine.device.token_masks import Outcome
from engine.outputs import StepOutput, StepPlan, TokenLogprobs


@dataclass(frozen=True)
class SamplesOnHost:
    """Samples on their way to the host, one for each logits position of a step.

    `num_logprobs`: for each how many most likely tokens to return beside the chosen one, None for no
    log-probabilities at all; empty if no row asked for any. `outcome`: what masks decided before sampling.
    """

    tokens: torch.Tensor
    logprobs: Logprobs | None = None
    num_logprobs: Sequence[int | None] = ()
    outcome: Outcome = field(default_factory=Outcome)
    readouts: ReadoutsOnHost = field(default_factory=ReadoutsOnHost)

    @classmethod
    def copy_from(
        cls, samples: Sampled, num_logits: int, num_logprobs: Sequence[int | None], outcome: Outcome
    ) -> "SamplesOnHost":
        """Copy the first `num_logits` samples without waiting; log-probabilities only if asked for."""
        tokens = to_host(samples.tokens[:num_logits])
        if not num_logprobs or samples.logprobs is None:
            return cls(tokens, outcome=outcome)
        logprobs = Logprobs(*(to_host(tensor[:num_logits]) for tensor in samples.logprobs))
        return cls(tokens, logprobs, num_logprobs, outcome)

    @classmethod
    def empty(cls) -> "SamplesOnHost":
        """Return the samples of a step that samples nothing."""
        return cls(torch.zeros(0, dtype=torch.int64))


def _token_logprobs(logprobs: Logprobs, num_logprobs: Sequence[int | None]) -> list[TokenLogprobs | None]:
    """Return the log-probabilities of each logits position as its row asked for them."""
    asked = [(row, count) for row, count in enumerate(num_logprobs) if count is not None]
    rows, width = [row for row, _ in asked], max(count for _, count in asked)
    found: list[TokenLogprobs | None] = [None] * len(num_logprobs)
    for (row, count), logprob, values, ids in zip(
        asked,
        logprobs.chosen.numpy()[rows].tolist(),
        logprobs.top.numpy()[rows, :width].tolist(),
        logprobs.top_ids.numpy()[rows, :width].tolist(),
        strict=True,
    ):
        found[row] = TokenLogprobs(logprob, tuple(zip(ids[:count], values[:count], strict=True)))
    return found


def build_step_output(
    plan: StepPlan, samples: SamplesOnHost, start_seconds: float, end_seconds: float
) -> StepOutput:
    """Return the samples as the tokens of each row."""
    sampled = samples.tokens.tolist()
    spans = _spans(plan, sampled)
    ended = frozenset(samples.outcome.ended)
    if ended:
        spans = [range(0) if span and span.start in ended else span for span in spans]
    tokens = [tuple([sampled[index] for index in span]) for span in spans]
    logprobs = None
    if samples.logprobs is not None:
        found = _token_logprobs(samples.logprobs, samples.num_logprobs)
        logprobs = [tuple([found[index] for index in span]) for span in spans]
    problems: dict[int, str] = {}
    if samples.outcome.problems:
        ids = np.repeat(plan.sequence_ids, plan.num_logits).tolist()
        problems = {ids[index]: problem for index, problem in samples.outcome.problems.items()}
    return StepOutput(
        plan.step_id,
        tokens,
        start_seconds,
        end_seconds,
        logprobs,
        samples.outcome.num_constrained,
        samples.readouts.by_row(),
        problems,
    )


def _spans(plan: StepPlan, sampled: Sequence[int]) -> list[range]:
    """Return which of the samples are tokens of each row: up to the first that differs from its draft."""
    spans, end = [], 0
    for row, num_logits in enumerate(plan.num_logits):
        start, end = end, end + num_logits
        accepted = end
        if num_logits > 1:
            drafts = plan.token_ids[row][1 - num_logits :]
            differing = (index for index, draft in enumerate(drafts, start) if sampled[index] != draft)
            accepted = next(differing, end - 1) + 1
        spans.append(range(start, accepted))
    return spans
