"""Logits to tokens, for the whole batch at once."""

import torch

from engine.device.batch import StepBatch
from engine.device.slots import StateSlots
from kernels.penalties import apply_penalties
from kernels.sampling import sample


class Sampler:
    """Chooses the next token of every sampled row from its slot's parameters alone."""

    def __init__(self, slots: StateSlots, eos_token_ids: tuple[int, ...]) -> None:
        self._slots = slots
        self._eos_token_ids = eos_token_ids

    def __call__(self, logits: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Return the sampled tokens [num_sampled] int64 and make them the newest of their slots.

        `logits` [num_sampled, vocab_size] fp32 are edited in place where a row asks for it: penalties, then
        bias, then the ban of end tokens before `min_tokens`.
        """
        slots, rows = self._slots, batch.slots
        inits = [slots.inits[slot] for slot in batch.slots_host]
        has_penalties = any(init.sampling.has_penalties for init in inits)
        if has_penalties:
            assert slots.output_counts is not None and slots.prompt_mask is not None
            apply_penalties(
                logits,
                slots.output_counts,
                slots.prompt_mask,
                rows,
                slots.presence[rows],
                slots.frequency[rows],
                slots.repetition[rows],
            )
        self._add_bias(logits, batch)
        tokens = sample(
            logits,
            slots.temperature[rows],
            slots.top_k[rows],
            slots.top_p[rows],
            slots.min_p[rows],
            slots.seed[rows],
            batch.positions,
        )
        slots.last_token[rows] = tokens
        if has_penalties:
            assert slots.output_counts is not None
            # Rows without penalties count too: it costs nothing, and nobody reads their counts.
            slots.output_counts[rows, tokens] += 1
        return tokens

    def _add_bias(self, logits: torch.Tensor, batch: StepBatch) -> None:
        """Add each row's logit_bias, and minus infinity for tokens that would end it too early."""
        rows: list[int] = []
        token_ids: list[int] = []
        values: list[float] = []
        for index, (slot, num_outputs) in enumerate(zip(batch.slots_host, batch.num_outputs, strict=True)):
            sampling = self._slots.inits[slot].sampling
            for token_id, value in sampling.logit_bias:
                rows.append(index)
                token_ids.append(token_id)
                values.append(value)
            if num_outputs < sampling.min_tokens:
                banned = sampling.stop_token_ids.union(self._eos_token_ids)
                rows += [index] * len(banned)
                token_ids += banned
                values += [float("-inf")] * len(banned)
        if rows:
            index_tensor = torch.tensor((rows, token_ids), device=logits.device)
            value_tensor = torch.tensor(values, device=logits.device)
            logits.index_put_((index_tensor[0], index_tensor[1]), value_tensor, accumulate=True)
