"""Log-probabilities of tokens the host knows, those of prompts: asked for by rows with `scored`."""

from collections.abc import Callable

import torch

from engine.device.sampler import Logprobs
from engine.request import MAX_LOGPROBS
from kernels.logprobs import top_logprobs

# Logits at a time: those of a whole prompt would be gigabytes (8192 tokens, 128k logits: 4.2 GB).
SLICE_BYTES = 64 * 2**20


def score(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    followers: torch.Tensor,
    vocab_size: int,
) -> list[Logprobs]:
    """The log-probability of each of `followers` int64 [num_scored] in the place behind `hidden`.

    hidden [num_scored, hidden_size]. Comes in slices of the rows, none if there are no rows. Waits for
    nothing.
    """
    if not len(followers):
        return []
    size = max(1, SLICE_BYTES // (4 * vocab_size))
    num_top = min(MAX_LOGPROBS, vocab_size)
    return [
        Logprobs(*top_logprobs(logits_of(states), tokens, num_top))
        for states, tokens in zip(hidden.split(size), followers.split(size), strict=True)
    ]
