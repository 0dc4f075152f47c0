"""Search for the largest values of a row of logits without sorting it: parts of kernels, one program per row.

Thresholds are found bit by bit over keys, unsigned integers in the order of the values: 32 counts (or sums)
settle the k-th largest value exactly. Counting over a block of registers is cheap, over a whole row in
memory is not. So one pass over the row notes the maximum of every lane, the elements `lane + i * BLOCK`;
a threshold found among those maxima is a lower bound of the row's, and the few values above it, the
candidates, are gathered from the few lanes that hold any, in the order of their ids.

One program's loads would wait for memory block after block: `num_stages` has the next blocks under way.
"""

from kernels.dispatch import tl, triton

_TOP_BIT = tl.constexpr(0x80000000)


@triton.jit
def order_key(x):
    """Return uint32 keys ordered as the fp32 values x; no value has key 0."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)  # the sum turns -0 into 0
    return tl.where(bits >= _TOP_BIT, bits ^ 0xFFFFFFFF, bits | _TOP_BIT)


@triton.jit
def load_logits(row_ptr, start, vocab, BLOCK: tl.constexpr):
    """Return (ids, logits) of the block at start; -inf past the vocabulary."""
    ids = start + tl.arange(0, BLOCK)
    return ids, tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf"))


@triton.jit
def scan_row(row_ptr, vocab, factor, BLOCK: tl.constexpr):
    """Return (lane maxima [BLOCK], maximum, its lowest id, sum of 2 ** (factor * (logit - maximum)))."""
    lane = tl.arange(0, BLOCK)
    maxima = tl.full([BLOCK], float("-inf"), tl.float32)
    first_ids = lane
    sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocab, BLOCK, num_stages=4):
        ids, x = load_logits(row_ptr, start, vocab, BLOCK)
        first_ids = tl.where(x > maxima, ids, first_ids)
        larger = tl.maximum(maxima, x)
        reference = tl.where(larger == float("-inf"), 0.0, larger)
        sums = sums * tl.exp2((maxima - reference) * factor) + tl.exp2((x - reference) * factor)
        maxima = larger
    maximum = tl.max(maxima, 0)
    best_id = tl.min(tl.where(maxima == maximum, first_ids, vocab), 0)
    return maxima, maximum, best_id, tl.sum(sums * tl.exp2((maxima - maximum) * factor), 0)


@triton.jit
def kth_key(keys, k):
    """Return the k-th largest of keys [n]: the largest threshold that at least k of them reach."""
    threshold = tl.full((), 0, tl.uint32)
    step = tl.full((), _TOP_BIT, tl.uint32)
    for _ in range(32):
        trial = threshold | step
        enough = tl.sum((keys >= trial).to(tl.int32), 0) >= k
        threshold = tl.where(enough, trial, threshold)
        step = step >> 1
    return threshold


@triton.jit
def mass_key(keys, weights, target):
    """Return the largest threshold such that the weights of the keys that reach it sum to target, or 0."""
    threshold = tl.full((), 0, tl.uint32)
    step = tl.full((), _TOP_BIT, tl.uint32)
    for _ in range(32):
        trial = threshold | step
        enough = tl.sum(tl.where(keys >= trial, weights, 0.0), 0) >= target
        threshold = tl.where(enough, trial, threshold)
        step = step >> 1
    return threshold


@triton.jit
def gather_candidates(row_ptr, vocab, maxima, threshold, lanes_ptr, values_ptr, ids_ptr, BLOCK: tl.constexpr):
    """Store the logits whose key reaches threshold, and their ids, in the order of ids; return their number.

    Those past BLOCK are counted, not stored. Only lanes whose maximum reaches the threshold are read again.
    """
    lane = tl.arange(0, BLOCK)
    is_open = (order_key(maxima) >= threshold).to(tl.int32)
    num_lanes = tl.sum(is_open, 0)
    tl.store(lanes_ptr + tl.cumsum(is_open, 0) - 1, lane, mask=is_open > 0)
    tl.debug_barrier()  # other threads of this program will read what was stored
    num_elements = num_lanes * tl.cdiv(vocab, BLOCK)
    count = tl.full((), 0, tl.int32)
    for start in range(0, num_elements, BLOCK):
        element = start + lane
        there = element < num_elements
        ids = element // num_lanes * BLOCK + tl.load(lanes_ptr + element % num_lanes, mask=there, other=0)
        there = there & (ids < vocab)
        x = tl.load(row_ptr + ids, mask=there, other=float("-inf"))
        taken = (there & (order_key(x) >= threshold)).to(tl.int32)
        place = count + tl.cumsum(taken, 0) - 1
        stored = (taken > 0) & (place < BLOCK)
        tl.store(values_ptr + place, x, mask=stored)
        tl.store(ids_ptr + place, ids, mask=stored)
        count += tl.sum(taken, 0)
    tl.debug_barrier()
    return count
