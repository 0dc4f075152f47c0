"""Samples the next tokens of a whole batch at once."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from engine.device.slots import StateSlots
from engine.readouts import MAX_LOGPROBS
from kernels.logprobs import top_logprobs
from kernels.penalties import apply_penalties
from kernels.sampling import sample
from kernels.token_mask import apply_token_mask


class Logprobs(NamedTuple):
    """Log-softmax of the logits as the model gave them, before anything edits them.

    `chosen` fp32 [num_rows]; `top` fp32 and `top_ids` int64 [num_rows, MAX_LOGPROBS], best first.
    """

    chosen: torch.Tensor
    top: torch.Tensor
    top_ids: torch.Tensor


class Sampled(NamedTuple):
    """`tokens` int64 [num_rows], NO_TOKEN where no token has a finite probability; logprobs if asked for."""

    tokens: torch.Tensor
    logprobs: Logprobs | None = None


class SamplingProgram(Protocol):
    """Sampling bound to its inputs: launched kernel by kernel or replayed as a graph."""

    def plain(self) -> Sampled:
        """Sample rows whose logits need no edit; see Sampler.plain."""

    def full(self, *, with_logprobs: bool) -> Sampled:
        """Sample after the slots' logit edits; see Sampler.full. A graph computes logprobs in any case."""


class Sampler:
    """Chooses the next token at every logits position from its slot's state alone.

    Both methods read nothing from the host, so each can be a CUDA graph. `logits` are fp32
    [num_rows, vocab_size]; `rows` int64 [num_rows] are slots; `positions` int64 [num_rows] are those of the
    new tokens: with the seed they determine the draw.
    """

    def __init__(self, slots: StateSlots) -> None:
        self._slots = slots

    def plain(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> Sampled:
        """Choose by temperature and filters, and write the token to its slot as the last one."""
        state = self._slots
        parameters = (state.temperature, state.top_k, state.top_p, state.min_p, state.seed)
        tokens = sample(logits, rows, *parameters, positions)
        state.last_token[rows] = tokens.clamp(min=0)
        return Sampled(tokens)

    def full(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, *, with_logprobs: bool
    ) -> Sampled:
        """Choose after penalties, bias and mask, applied to a copy of `logits`; count the chosen tokens."""
        state = self._slots
        edited = logits.clone()
        if state.output_counts is not None and state.prompt_mask is not None:
            apply_penalties(
                edited,
                state.output_counts,
                state.prompt_mask,
                rows,
                state.presence[rows],
                state.frequency[rows],
                state.repetition[rows],
            )
        edited.scatter_add_(1, state.bias_ids[rows], state.bias_values[rows])
        apply_token_mask(edited, state.token_masks, rows)
        tokens = self.plain(edited, rows, positions).tokens
        chosen = tokens.clamp(min=0)
        if state.output_counts is not None:
            # Rows without penalties count, too: it costs nothing, and their counts are never read.
            state.output_counts[rows, chosen] += 1
        if not with_logprobs:
            return Sampled(tokens)
        logprobs = Logprobs(*top_logprobs(logits, chosen, min(MAX_LOGPROBS, logits.shape[1])))
        return Sampled(tokens, logprobs)


@dataclass(frozen=True)
class EagerSampling:
    """A SamplingProgram that calls the sampler; fields as the arguments of its methods."""

    sampler: Sampler
    logits: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor

    def plain(self) -> Sampled:
        return self.sampler.plain(self.logits, self.rows, self.positions)

    def full(self, *, with_logprobs: bool) -> Sampled:
        return self.sampler.full(self.logits, self.rows, self.positions, with_logprobs=with_logprobs)
