"""Log-probabilities of tokens the host knows, those of prompts: asked for by rows with `scored`."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.request import MAX_LOGPROBS
from kernels.logprobs import top_logprobs

# Logits at a time: those of a whole prompt would be gigabytes (8192 tokens, 128k logits: 4.2 GB).
SLICE_BYTES = 64 * 2**20


class Scores(NamedTuple):
    """Log-softmax of the logits in front of known tokens.

    `chosen` fp32 [num_tokens] of the tokens; `top` fp32 and `top_ids` int64 [num_tokens, MAX_LOGPROBS], best
    first; `ranks` int64 [num_tokens]: how many tokens are as likely as the known one at least, itself among
    them.
    """

    chosen: torch.Tensor
    top: torch.Tensor
    top_ids: torch.Tensor
    ranks: torch.Tensor


def score(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    followers: torch.Tensor,
    vocab_size: int,
) -> list[Scores]:
    """The log-probability and rank of each of `followers` int64 [num_scored] in the place behind `hidden`.

    hidden [num_scored, hidden_size]. Comes in slices of the rows, none if there are no rows. Waits for
    nothing.
    """
    if not len(followers):
        return []
    size = max(1, SLICE_BYTES // (4 * vocab_size))
    num_top = min(MAX_LOGPROBS, vocab_size)
    return [
        score_slice(logits_of(states), tokens, num_top)
        for states, tokens in zip(hidden.split(size), followers.split(size), strict=True)
    ]


def score_slice(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> Scores:
    """The scores of `tokens` int64 [num_tokens] by their `logits` fp32 [num_tokens, vocab_size]."""
    ranks = (logits >= logits.gather(1, tokens.unsqueeze(1))).sum(-1)
    return Scores(*top_logprobs(logits, tokens, num_top), ranks)
