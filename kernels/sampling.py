"""Choosing the next token of every row: temperature, top-k, top-p, min-p, one draw per row."""

import math

import torch

from kernels.dispatch import dispatch
from kernels.philox import uniform_torch

GREEDY_BELOW = 1e-5  # temperatures below this mean argmax
_MIN_CANDIDATES = 256  # covers top_p 0.95 of nearly every step of a trained model
_MAX_CANDIDATES = 1024  # beyond, selecting candidates costs more than half of a full sort


def sample_torch(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """Return one token id per row; a row's token depends on that row alone.

    logits [num_rows, vocab] fp32; temperature, top_p, min_p [num_rows] fp32; top_k [num_rows] int32; seed and
    position [num_rows] int64; returns [num_rows] int64. Temperature below 1e-5 takes the most likely token,
    the lowest id among equals. Otherwise, over softmax(logits / temperature), a token is kept if it passes
    all three filters, and tokens as likely as one that is kept are kept too:

    - top-k: among the k most likely (0 = off);
    - top-p: in the smallest set of most likely tokens whose share of what top-k left reaches top_p (1 = off);
    - min-p: at least min_p times as likely as the most likely one (0 = off).

    The draw inverts the cumulative distribution over kept tokens in the order of their ids: the first id
    whose cumulative mass exceeds `uniform(seed, position)` times the total.
    """
    greedy = temperature < GREEDY_BELOW
    if bool(greedy.all()):
        return logits.argmax(-1)
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    groups = (
        (greedy, lambda x, *_: x.argmax(-1)),
        (~greedy & ~filtered, _sample_unfiltered),
        (~greedy & filtered, _sample_filtered),
    )
    for members, choose in groups:
        if bool(members.all()):
            return choose(logits, temperature, top_k, top_p, min_p, seed, position)
        rows = members.nonzero().squeeze(1)
        if rows.numel():
            args = (logits, temperature, top_k, top_p, min_p, seed, position)
            tokens[rows] = choose(*(t[rows] for t in args))
    return tokens


def _sample_unfiltered(logits, temperature, top_k, top_p, min_p, seed, position):
    scaled = logits / temperature.unsqueeze(1)
    weights = scaled.sub_(scaled.amax(-1, keepdim=True)).exp_()
    return _draw(weights, seed, position).squeeze(1)


def _sample_filtered(logits, temperature, top_k, top_p, min_p, seed, position):
    """Draw from the candidates alone, and from the whole row only where those don't cover what is kept."""
    vocab = logits.shape[1]
    # One more than the largest k, to see whether the k-th has equals.
    num_candidates = min(vocab, _MAX_CANDIDATES, max(_MIN_CANDIDATES, int(top_k.max())) + 1)
    scaled, ids = logits.topk(num_candidates, dim=-1)
    inverse = (1 / temperature).unsqueeze(1)
    maximum = scaled[:, :1]
    weights = scaled.sub(maximum).mul_(inverse).exp_()
    total = weights.sum(-1)
    open_ended = (top_k <= 0) & (top_p < 1)
    if bool(open_ended.any()):
        rows = open_ended.nonzero().squeeze(1)
        total[rows] = logits[rows].sub_(maximum[rows]).mul_(inverse[rows]).exp_().sum(-1)
    threshold = _threshold(weights, total, top_k, top_p, min_p)
    if num_candidates < vocab:
        uncovered = ((weights[:, -1] >= threshold) | (top_k >= num_candidates)).nonzero().squeeze(1)
    else:
        uncovered = ids.new_empty(0)
    ids, order = ids.sort(dim=-1)
    weights = torch.where(weights >= threshold.unsqueeze(1), weights, 0).gather(1, order)
    tokens = ids.gather(1, _draw(weights, seed, position)).squeeze(1)
    if uncovered.numel():
        tokens[uncovered] = _sample_sorted(
            *(t[uncovered] for t in (logits, temperature, top_k, top_p, min_p, seed, position))
        )
    return tokens


def _sample_sorted(logits, temperature, top_k, top_p, min_p, seed, position):
    """The same with the whole vocabulary as candidates: for flat distributions and very large k."""
    scaled = logits.sub(logits.amax(-1, keepdim=True)).div_(temperature.unsqueeze(1))
    weights = scaled.exp_()
    ordered = weights.sort(dim=-1, descending=True).values
    threshold = _threshold(ordered, ordered.sum(-1), top_k, top_p, min_p)
    weights = torch.where(weights >= threshold.unsqueeze(1), weights, 0)
    return _draw(weights, seed, position).squeeze(1)


def _threshold(weights, total, top_k, top_p, min_p):
    """Return the smallest weight that is kept, [rows]; weights [rows, n] descending from 1, total [rows]."""
    n = weights.shape[1]
    last = torch.where(top_k > 0, top_k.clamp(max=n), n).to(torch.int64).sub_(1).unsqueeze(1)
    threshold = torch.where(top_k > 0, weights.gather(1, last).squeeze(1), 0)
    kept = torch.where(weights >= threshold.unsqueeze(1), weights, 0).cumsum(-1, dtype=torch.float64)
    total = torch.where(top_k > 0, kept[:, -1], total)
    target = torch.where(top_p < 1, top_p * total, math.inf).unsqueeze(1)
    reached = (kept < target).sum(-1, keepdim=True).clamp_(max=n - 1)
    nucleus = torch.where(top_p < 1, weights.gather(1, reached).squeeze(1), 0)
    return torch.maximum(torch.maximum(threshold, nucleus), min_p)


def _draw(weights, seed, position):
    """Invert the cumulative distribution of weights [rows, n]; returns the index [rows, 1]."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1]
    target = uniform_torch(seed, position) * total
    # The product may round up to the total, beyond which no token lies.
    target = torch.minimum(target, torch.nextafter(total, total.new_zeros(())))
    return torch.searchsorted(cumulative, target.unsqueeze(1), right=True)


sample = dispatch(sample_torch, sample_torch)
