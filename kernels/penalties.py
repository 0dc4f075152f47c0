"""Repetition, presence and frequency penalties on the logits of a step."""

import torch

from kernels.dispatch import dispatch, tl, triton

_BLOCK = 2048


@triton.jit
def _apply_penalties_kernel(
    logits_ptr,
    output_counts_ptr,
    prompt_mask_ptr,
    slots_ptr,
    presence_ptr,
    frequency_ptr,
    repetition_ptr,
    logits_stride,
    counts_stride,
    mask_stride,
    vocab,
    BLOCK: tl.constexpr,
):
    """One program per row and block of the vocabulary; rows without penalties end at once."""
    row = tl.program_id(0).to(tl.int64)
    presence = tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    repetition = tl.load(repetition_ptr + row)
    if (presence != 0) | (frequency != 0) | (repetition != 1):
        slot = tl.load(slots_ptr + row)
        tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < vocab
        target = logits_ptr + row * logits_stride + tokens
        logits = tl.load(target, mask=inside, other=0.0)
        counts = tl.load(output_counts_ptr + slot * counts_stride + tokens, mask=inside, other=0)
        in_prompt = tl.load(prompt_mask_ptr + slot * mask_stride + tokens, mask=inside, other=0)
        produced = counts > 0
        factor = tl.where(logits > 0, 1.0 / repetition, repetition)
        logits = tl.where(produced | (in_prompt != 0), logits * factor, logits)
        logits -= frequency * counts.to(tl.float32) + tl.where(produced, presence, 0.0)
        tl.store(target, logits, mask=inside)


def apply_penalties_triton(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_mask: torch.Tensor,
    slots: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    num_rows, vocab = logits.shape
    assert logits.stride(1) == output_counts.stride(1) == prompt_mask.stride(1) == 1
    if num_rows:
        _apply_penalties_kernel[(num_rows, triton.cdiv(vocab, _BLOCK))](
            logits,
            output_counts,
            prompt_mask,
            slots,
            presence,
            frequency,
            repetition,
            logits.stride(0),
            output_counts.stride(0),
            prompt_mask.stride(0),
            vocab,
            BLOCK=_BLOCK,
        )


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


apply_penalties = dispatch(apply_penalties_triton, apply_penalties_torch)
