"""Log-probabilities of chosen tokens and of the most likely tokens."""

import math

import torch

from kernels.dispatch import dispatch, tl, triton
from kernels.row_search import gather_candidates, kth_key, load_logits, order_key, scan_row

_LOG2_E = tl.constexpr(math.log2(math.e))
_MAX_BLOCK = 4096  # logits at a time, and candidates at most


@triton.jit
def _top_logprobs_kernel(
    logits_ptr,
    chosen_ptr,
    lanes_ptr,
    values_ptr,
    ids_ptr,
    chosen_logprob_ptr,
    top_values_ptr,
    top_ids_ptr,
    logits_stride,
    vocab,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row; the n best are taken one by one out of at most BLOCK candidates."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    maxima, maximum, _, total = scan_row(row_ptr, vocab, _LOG2_E, BLOCK)
    normalizer = maximum + tl.log2(total) / _LOG2_E
    chosen = tl.load(row_ptr + tl.load(chosen_ptr + row))
    tl.store(chosen_logprob_ptr + row, chosen - normalizer)
    if N > 0:
        lanes_ptr += row * BLOCK
        values_ptr += row * BLOCK
        ids_ptr += row * BLOCK
        top_values_ptr += row * N
        top_ids_ptr += row * N
        bound = kth_key(order_key(maxima), N)
        count = gather_candidates(row_ptr, vocab, maxima, bound, lanes_ptr, values_ptr, ids_ptr, BLOCK)
        if count <= BLOCK:
            place = tl.arange(0, BLOCK)
            x = tl.load(values_ptr + place, mask=place < count, other=float("-inf"))
            ids = tl.load(ids_ptr + place, mask=place < count, other=vocab)
            for i in range(N):
                best = tl.max(x, 0)
                best_id = tl.min(tl.where((x == best) & (ids < vocab), ids, vocab), 0)
                tl.store(top_values_ptr + i, best - normalizer)
                tl.store(top_ids_ptr + i, best_id.to(tl.int64))
                taken = ids == best_id
                x = tl.where(taken, float("-inf"), x)
                ids = tl.where(taken, vocab, ids)
        else:
            # More equal values than fit: one pass over the row for each of the n best.
            before = tl.full((), float("inf"), tl.float32)
            before_id = tl.full((), -1, tl.int32)
            for i in range(N):
                best = tl.full((), float("-inf"), tl.float32)
                best_id = vocab + before_id * 0
                for start in tl.range(0, vocab, BLOCK, num_stages=4):
                    ids, x = load_logits(row_ptr, start, vocab, BLOCK)
                    left = (ids < vocab) & ((x < before) | ((x == before) & (ids > before_id)))
                    x = tl.where(left, x, float("-inf"))
                    largest = tl.max(x, 0)
                    largest_id = tl.min(tl.where(left & (x == largest), ids, vocab), 0)
                    better = (largest > best) | ((best_id == vocab) & (largest_id < vocab))
                    best_id = tl.where(better, largest_id, best_id)
                    best = tl.where(better, largest, best)
                tl.store(top_values_ptr + i, best - normalizer)
                tl.store(top_ids_ptr + i, best_id.to(tl.int64))
                before = best
                before_id = best_id


def top_logprobs_triton(
    logits: torch.Tensor, chosen: torch.Tensor, n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1 and logits.dtype == torch.float32 and n <= vocab
    device = logits.device
    chosen_logprob = torch.empty(num_rows, dtype=torch.float32, device=device)
    top_values = torch.empty(num_rows, n, dtype=torch.float32, device=device)
    top_ids = torch.empty(num_rows, n, dtype=torch.int64, device=device)
    block = min(_MAX_BLOCK, triton.next_power_of_2(vocab))
    lanes, ids = torch.empty(2, num_rows, block, dtype=torch.int32, device=device)
    if num_rows:
        _top_logprobs_kernel[(num_rows,)](
            logits,
            chosen,
            lanes,
            torch.empty(num_rows, block, dtype=torch.float32, device=device),
            ids,
            chosen_logprob,
            top_values,
            top_ids,
            logits.stride(0),
            vocab,
            N=n,
            BLOCK=block,
            num_warps=16,
        )
    return chosen_logprob, top_values, top_ids


def top_logprobs_torch(
    logits: torch.Tensor, chosen: torch.Tensor, n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the log-probability of each row's chosen token and its n most likely tokens, best first.

    logits [num_rows, vocab] fp32, chosen [num_rows] int64; returns (chosen_logprob [num_rows] fp32,
    top_values [num_rows, n] fp32, top_ids [num_rows, n] int64). The order of equally
    likely tokens is unspecified.
    """
    logprobs = logits.log_softmax(-1)  # the order of logsumexp's sums depends on the number of rows
    top_ids = logits.topk(n, dim=-1).indices
    return logprobs.gather(1, chosen.unsqueeze(1)).squeeze(1), logprobs.gather(1, top_ids), top_ids


top_logprobs = dispatch(top_logprobs_triton, top_logprobs_torch)
