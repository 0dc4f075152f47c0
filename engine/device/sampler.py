"""Logits to tokens, for the whole batch at once."""

from typing import NamedTuple

import torch

from engine.device.slots import StateSlots
from engine.request import MAX_LOGPROBS
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


class Sampler:
    """Chooses the next token of every sampled row from its slot's state alone.

    Both methods read nothing from the host, so each can be a CUDA graph. `logits` are fp32
    [num_rows, vocab_size]; `rows` int64 [num_rows] are slots; `positions` int64 [num_rows] are those of the
    new tokens: with the seed they determine the draw.
    """

    def __init__(self, slots: StateSlots) -> None:
        self._slots = slots

    def plain(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> Sampled:
        """Choose by temperature and filters; the token becomes the newest of the row's slot."""
        state = self._slots
        parameters = (state.temperature, state.top_k, state.top_p, state.min_p, state.seed)
        tokens = sample(logits, rows, *parameters, positions)
        state.last_token[rows] = tokens.clamp(min=0)
        return Sampled(tokens)

    def full(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, *, with_logprobs: bool
    ) -> Sampled:
        """The same after penalties, bias and mask, which leave `logits` as they are; counts the tokens."""
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
            # Rows without penalties count too: it costs nothing, and nobody reads their counts.
            state.output_counts[rows, chosen] += 1
        if not with_logprobs:
            return Sampled(tokens)
        logprobs = Logprobs(*top_logprobs(logits, chosen, min(MAX_LOGPROBS, logits.shape[1])))
        return Sampled(tokens, logprobs)
