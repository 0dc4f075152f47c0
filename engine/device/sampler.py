"""Logits to tokens, for the whole batch at once."""

from collections.abc import Sequence

import torch

from engine.device.slots import StateSlots
from kernels.penalties import apply_penalties
from kernels.sampling import sample


class Sampler:
    """Chooses the next token of every sampled row from its slot's parameters alone.

    In three parts, so that the middle one, which reads nothing from the host, can be a CUDA graph: edit()
    the logits where a row asks for it, choose() the tokens, count() them where a penalty needs it.
    """

    def __init__(self, slots: StateSlots, eos_token_ids: tuple[int, ...]) -> None:
        self._slots = slots
        self._eos_token_ids = eos_token_ids

    def edit(
        self, logits: torch.Tensor, rows: torch.Tensor, slots: Sequence[int], num_outputs: Sequence[int]
    ) -> None:
        """Change `logits` [num_rows, vocab_size] fp32 in place: penalties, bias, no end before min_tokens.

        `rows` int64 [num_rows] and `slots` are the rows' slots, on the device and here; `num_outputs` counts
        the output tokens each has already.
        """
        state = self._slots
        if self._has_penalties(slots):
            assert state.output_counts is not None and state.prompt_mask is not None
            apply_penalties(
                logits,
                state.output_counts,
                state.prompt_mask,
                rows,
                state.presence[rows],
                state.frequency[rows],
                state.repetition[rows],
            )
        self._add_bias(logits, slots, num_outputs)

    def choose(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return a token for each row, int64 [num_rows], and make it the newest of the row's slot.

        `positions` int64 [num_rows] are those of the new tokens: with the seed they determine the draw.
        """
        state = self._slots
        tokens = sample(
            logits,
            state.temperature[rows],
            state.top_k[rows],
            state.top_p[rows],
            state.min_p[rows],
            state.seed[rows],
            positions,
        )
        state.last_token[rows] = tokens
        return tokens

    def count(self, tokens: torch.Tensor, rows: torch.Tensor, slots: Sequence[int]) -> None:
        """Remember the new tokens of rows for their penalties."""
        if self._has_penalties(slots):
            assert self._slots.output_counts is not None
            # Rows without penalties count too: it costs nothing, and nobody reads their counts.
            self._slots.output_counts[rows, tokens] += 1

    def has_edits(self, slots: Sequence[int], num_outputs: Sequence[int]) -> bool:
        """Whether edit() or count() would do anything for these rows."""
        params = [self._slots.inits[slot].sampling for slot in slots]
        return any(
            sampling.has_penalties or sampling.logit_bias or count < sampling.min_tokens
            for sampling, count in zip(params, num_outputs, strict=True)
        )

    def _has_penalties(self, slots: Sequence[int]) -> bool:
        return any(self._slots.inits[slot].sampling.has_penalties for slot in slots)

    def _add_bias(self, logits: torch.Tensor, slots: Sequence[int], num_outputs: Sequence[int]) -> None:
        """Add each row's logit_bias, and minus infinity for tokens that would end it too early."""
        rows: list[int] = []
        token_ids: list[int] = []
        values: list[float] = []
        for row, (slot, count) in enumerate(zip(slots, num_outputs, strict=True)):
            sampling = self._slots.inits[slot].sampling
            for token_id, value in sampling.logit_bias:
                rows.append(row)
                token_ids.append(token_id)
                values.append(value)
            if count < sampling.min_tokens:
                banned = sampling.stop_token_ids.union(self._eos_token_ids)
                rows += [row] * len(banned)
                token_ids += banned
                values += [float("-inf")] * len(banned)
        if rows:
            index = torch.tensor((rows, token_ids), device=logits.device)
            bias = torch.tensor(values, device=logits.device)
            logits.index_put_((index[0], index[1]), bias, accumulate=True)
