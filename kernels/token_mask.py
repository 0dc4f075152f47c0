"""Masks of allowed tokens: one bit per token of the vocabulary."""

import torch

from kernels.dispatch import dispatch, tl, triton

_BLOCK = 4096
_WORD_BITS = tl.constexpr(32)


@triton.jit
def _apply_token_mask_kernel(
    logits_ptr, masks_ptr, slots_ptr, logits_stride, masks_stride, vocab, BLOCK: tl.constexpr
):
    """One program per row and block of the vocabulary; writes only what is forbidden."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    words = tl.load(masks_ptr + slot * masks_stride + tokens // _WORD_BITS, mask=inside, other=-1)
    forbidden = inside & (((words >> (tokens % _WORD_BITS)) & 1) == 0)
    tl.store(logits_ptr + row * logits_stride + tokens, float("-inf"), mask=forbidden)


def apply_token_mask_triton(logits: torch.Tensor, masks: torch.Tensor, slots: torch.Tensor) -> None:
    num_rows, vocab = logits.shape
    assert logits.stride(1) == masks.stride(1) == 1
    if num_rows:
        _apply_token_mask_kernel[(num_rows, triton.cdiv(vocab, _BLOCK))](
            logits, masks, slots, logits.stride(0), masks.stride(0), vocab, BLOCK=_BLOCK
        )


def apply_token_mask_torch(logits: torch.Tensor, masks: torch.Tensor, slots: torch.Tensor) -> None:
    """Set, in place, the logits of forbidden tokens to minus infinity.

    logits [num_rows, vocab] fp32; masks [num_slots, ceil(vocab / 32)] int32: bit `t % 32` of word `t // 32`
    is set where token t is allowed; slots [num_rows] int64 names each row's mask.
    """
    words = masks[slots]
    bits = (words.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    logits.masked_fill_(bits.view(words.shape[0], -1)[:, : logits.shape[1]] == 0, float("-inf"))


apply_token_mask = dispatch(apply_token_mask_triton, apply_token_mask_torch)
