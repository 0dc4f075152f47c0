"""Log-probabilities of chosen and of the most likely tokens."""

import torch

from kernels.dispatch import dispatch


def top_logprobs_torch(
    logits: torch.Tensor, chosen: torch.Tensor, n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the log-probability of each row's chosen token and its n most likely tokens, best first.

    logits [num_rows, vocab] fp32, chosen [num_rows] int64; returns (chosen_logprob [num_rows] fp32,
    top_values [num_rows, n] fp32, top_ids [num_rows, n] int64).
    """
    normalizer = logits.logsumexp(-1, keepdim=True)
    top = logits.topk(n, dim=-1)
    chosen_logprob = (logits.gather(1, chosen.unsqueeze(1)) - normalizer).squeeze(1)
    return chosen_logprob, top.values - normalizer, top.indices


top_logprobs = dispatch(top_logprobs_torch, top_logprobs_torch)
