"""Repetition, presence and frequency penalties on the logits of a step."""

import torch

from kernels.dispatch import dispatch


def apply_penalties_torch(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_mask: torch.Tensor,
    slots: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Lower, in place, the logits of tokens that a row has seen before.

    logits [num_rows, vocab] fp32; output_counts [num_slots, vocab] int32: how often the slot's sequence has
    produced a token; prompt_mask [num_slots, vocab] bool: tokens of its prompt; slots [num_rows] int64 names
    each row's slot; presence, frequency, repetition [num_rows] fp32. First the repetition penalty (Keskar et
    al., 2019; 1 = off) over prompt and output: positive logits are divided by it, others multiplied. Then,
    over the output alone, `logit -= frequency * count + presence * (count > 0)`.
    """
    off = (presence == 0) & (frequency == 0) & (repetition == 1)
    rows = (~off).nonzero().squeeze(1)
    if rows.numel() == 0:
        return
    counts = output_counts[slots[rows]]
    x, presence, frequency, repetition = (t[rows] for t in (logits, presence, frequency, repetition))
    produced = counts > 0
    seen = prompt_mask[slots[rows]] | produced
    factor = torch.where(x > 0, 1 / repetition.unsqueeze(1), repetition.unsqueeze(1))
    x = torch.where(seen, x * factor, x)
    x -= frequency.unsqueeze(1) * counts + presence.unsqueeze(1) * produced
    logits[rows] = x


apply_penalties = dispatch(apply_penalties_torch, apply_penalties_torch)
