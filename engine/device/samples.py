"""What was sampled, on its way from the device to a StepOutput."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.device.sampler import Logprobs, Sampled
from engine.outputs import StepOutput, StepPlan, TokenLogprobs


@dataclass(frozen=True)
class HostSamples:
    """Samples on their way to the host; `num_logprobs`: how many most likely tokens each wants told.

    The rows `ended`, of `num_constrained` that waited for a mask, have no token: their constraints let none
    follow.
    """

    tokens: torch.Tensor
    logprobs: Logprobs | None = None
    num_logprobs: Sequence[int | None] = ()
    ended: Sequence[int] = ()
    num_constrained: int = 0

    @classmethod
    def of(cls, samples: Sampled, num_rows: int, num_logprobs: Sequence[int | None]) -> "HostSamples":
        """Copy the first `num_rows`, without waiting; log-probabilities only where one is wanted."""
        tokens = _to_host(samples.tokens[:num_rows])
        if not num_logprobs or samples.logprobs is None:
            return cls(tokens)
        logprobs = Logprobs(*(_to_host(tensor[:num_rows]) for tensor in samples.logprobs))
        return cls(tokens, logprobs, num_logprobs)

    def told(self) -> Iterator[TokenLogprobs | None]:
        """The log-probabilities of each sample, None for those that want none."""
        assert self.logprobs is not None
        columns = (tensor.tolist() for tensor in self.logprobs)
        for logprob, values, ids, count in zip(*columns, self.num_logprobs, strict=True):
            if count is None:
                yield None
            else:
                yield TokenLogprobs(logprob, tuple(zip(ids[:count], values[:count], strict=True)))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, where the device will have written once its stream gets there."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def step_output(plan: StepPlan, samples: HostSamples, start_seconds: float, end_seconds: float) -> StepOutput:
    """Samples, one for each decode row and for each chunk with `sample`, as the tokens of each row."""
    is_sampled = [True] * len(plan.decode.slots) + [row.sample for row in plan.chunks]
    sampled: list[tuple[int, ...]] = [(token_id,) for token_id in samples.tokens.tolist()]
    for index in samples.ended:
        sampled[index] = ()
    values = iter(sampled)
    tokens = [next(values) if there else () for there in is_sampled]
    logprobs = None
    if samples.logprobs is not None:
        told: list[tuple[TokenLogprobs | None, ...]] = [(entry,) for entry in samples.told()]
        for index in samples.ended:
            told[index] = ()
        entries = iter(told)
        logprobs = [next(entries) if there else () for there in is_sampled]
    return StepOutput(plan.step_id, tokens, start_seconds, end_seconds, logprobs, samples.num_constrained)
