"""Sampling of the next token of every row: temperature, top-k, top-p, min-p, one draw per row."""

import math

import torch

from kernels.cpu import sampling as cpu
from kernels.dispatch import dispatch, tl, triton
from kernels.philox import philox_uniform, uniform_torch
from kernels.row_search import gather_candidates, kth_key, load_logits, mass_key, order_key, scan_row

GREEDY_BELOW = 1e-5  # temperatures below this mean argmax
_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_LOG2_E = tl.constexpr(math.log2(math.e))
_ABOVE_MINUS_INFINITY = tl.constexpr(0x00800000)  # the lowest key of a finite number
_MAX_BLOCK = 4096  # logits at a time, and candidates at most

_MIN_CANDIDATES = 256  # covers top_p 0.95 of nearly every step of a trained model
_MAX_CANDIDATES = 1024  # beyond, selecting candidates costs more than half of a full sort


# Inputs per row and per slot may be rows of larger tensors, aligned or not.
@triton.jit(
    do_not_specialize_on_alignment=[
        "slots_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "position_ptr"
    ]
)  # fmt: skip
def _sample_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    position_ptr,
    lanes_ptr,
    values_ptr,
    ids_ptr,
    tokens_ptr,
    logits_stride,
    vocab,
    BLOCK: tl.constexpr,
):
    """One program per row, which is read once in most cases, and some lanes of it twice."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    greedy = temperature < _GREEDY_BELOW
    factor = _LOG2_E / tl.where(greedy, 1.0, temperature)
    maxima, maximum, token, total = scan_row(row_ptr, vocab, factor, BLOCK)
    if temperature >= _GREEDY_BELOW:
        top_k = tl.load(top_k_ptr + slot)
        top_k = tl.where(top_k < vocab, tl.maximum(top_k, 0), 0)
        top_p = tl.load(top_p_ptr + slot)
        min_p = tl.load(min_p_ptr + slot)
        number = philox_uniform(tl.load(seed_ptr + slot), tl.load(position_ptr + row))
        token = _draw_from_candidates(
            row_ptr, vocab, factor, maxima, maximum, total, top_k, top_p, min_p, number,
            lanes_ptr + row * BLOCK, values_ptr + row * BLOCK, ids_ptr + row * BLOCK, BLOCK,
        )  # fmt: skip
        if token < 0:
            token = _draw_from_row(row_ptr, vocab, factor, maximum, total, top_k, top_p, min_p, number, BLOCK)
    # NaN or +inf anywhere, or -inf everywhere, makes the total NaN.
    tl.store(tokens_ptr + row, tl.where(total > 0, tl.minimum(token, vocab - 1), -1).to(tl.int64))


@triton.jit
def _draw_from_candidates(
    row_ptr,
    vocab,
    factor,
    maxima,
    maximum,
    total,
    top_k,
    top_p,
    min_p,
    number,
    lanes_ptr,
    values_ptr,
    ids_ptr,
    BLOCK: tl.constexpr,
):
    """Return the token, or -1 if the kept tokens may not all be among at most BLOCK candidates."""
    token = tl.full((), -1, tl.int32)
    bound = tl.full((), 0, tl.uint32)
    if top_k > 0:
        if top_k <= BLOCK:
            bound = kth_key(order_key(maxima), top_k)
    else:
        if top_p < 1.0:
            bound = mass_key(order_key(maxima), tl.exp2((maxima - maximum) * factor), top_p * total)
        if min_p > 0.0:
            # A little lower than the limit itself: rounding must not lose a candidate.
            least = maximum + (tl.log2(min_p) - 0.01) / factor
            bound = tl.maximum(bound, order_key(least))
    if bound > 0:
        # Masked tokens, at -inf, are no candidates, however large k is.
        bound = tl.maximum(bound, tl.full((), _ABOVE_MINUS_INFINITY, tl.uint32))
        count = gather_candidates(row_ptr, vocab, maxima, bound, lanes_ptr, values_ptr, ids_ptr, BLOCK)
        if count <= BLOCK:
            place = tl.arange(0, BLOCK)
            there = place < count
            x = tl.load(values_ptr + place, mask=there, other=float("-inf"))
            ids = tl.load(ids_ptr + place, mask=there, other=0)
            keys = tl.where(there, order_key(x), 0)
            weights = tl.exp2((x - maximum) * factor)
            if top_k > 0:
                weights = tl.where(keys >= kth_key(keys, top_k), weights, 0.0)
                total = tl.sum(weights, 0)
            if top_p < 1.0:
                weights = tl.where(keys >= mass_key(keys, weights, top_p * total), weights, 0.0)
            weights = tl.where(weights >= min_p, weights, 0.0)
            cumulative = tl.cumsum(weights, 0)
            token = _invert(ids, weights, cumulative, number * tl.max(cumulative, 0), vocab)
    return token


@triton.jit
def _invert(ids, weights, cumulative, target, vocab):
    """Return the lowest weighted id whose cumulative weight exceeds target, else the highest weighted one."""
    drawn = tl.min(tl.where((weights > 0.0) & (cumulative > target), ids, vocab), 0)
    last = tl.max(tl.where(weights > 0.0, ids, 0), 0)
    return tl.where(drawn < vocab, drawn, last)


@triton.jit
def _draw_from_row(row_ptr, vocab, factor, maximum, total, top_k, top_p, min_p, number, BLOCK: tl.constexpr):
    """Return a token drawn with every token as a candidate: for unfiltered and for nearly flat rows."""
    bound = tl.full((), 0, tl.uint32)
    if top_k > 0:
        bound = _threshold_of_row(row_ptr, vocab, factor, maximum, bound, top_k.to(tl.float32), False, BLOCK)
        total = _mass_of_row(row_ptr, vocab, factor, maximum, bound, 0.0, BLOCK)
    if top_p < 1.0:
        bound = _threshold_of_row(row_ptr, vocab, factor, maximum, bound, top_p * total, True, BLOCK)
    target = number * _mass_of_row(row_ptr, vocab, factor, maximum, bound, min_p, BLOCK)
    token = tl.full((), -1, tl.int32)
    last = tl.full((), 0, tl.int32)
    before = tl.full((), 0.0, tl.float32)
    for start in tl.range(0, vocab, BLOCK, num_stages=4):
        ids, x = load_logits(row_ptr, start, vocab, BLOCK)
        if token < 0:
            weights = _kept_weights(x, factor, maximum, bound, min_p)
            mass = tl.sum(weights, 0)
            if before + mass > target:
                token = _invert(ids, weights, before + tl.cumsum(weights, 0), target, vocab)
            last = tl.maximum(last, tl.max(tl.where(weights > 0.0, ids, 0), 0))
            before += mass
    return tl.where(token < 0, last, token)


@triton.jit
def _kept_weights(x, factor, maximum, bound, min_p):
    weights = tl.exp2((x - maximum) * factor)
    return tl.where((order_key(x) >= bound) & (weights >= min_p), weights, 0.0)


@triton.jit
def _mass_of_row(row_ptr, vocab, factor, maximum, bound, min_p, BLOCK: tl.constexpr):
    mass = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocab, BLOCK, num_stages=4):
        _, x = load_logits(row_ptr, start, vocab, BLOCK)
        mass += _kept_weights(x, factor, maximum, bound, min_p)
    return tl.sum(mass, 0)


@triton.jit
def _threshold_of_row(
    row_ptr, vocab, factor, maximum, bound, target, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the largest key that target tokens reach, or tokens above bound that weigh target.

    Two bits with each pass over the row.
    """
    threshold = tl.full((), 0, tl.uint32)
    step = tl.full((), 0x40000000, tl.uint32)
    for _ in range(16):
        reach_1 = tl.zeros([BLOCK], tl.float32)
        reach_2 = tl.zeros([BLOCK], tl.float32)
        reach_3 = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, vocab, BLOCK, num_stages=4):
            ids, x = load_logits(row_ptr, start, vocab, BLOCK)
            keys = order_key(x)
            if WEIGHTED:
                worth = _kept_weights(x, factor, maximum, bound, 0.0)
            else:
                worth = (ids < vocab).to(tl.float32)
            reach_1 += tl.where(keys >= threshold + step, worth, 0.0)
            reach_2 += tl.where(keys >= threshold + 2 * step, worth, 0.0)
            reach_3 += tl.where(keys >= threshold + 3 * step, worth, 0.0)
        digit = (tl.sum(reach_1, 0) >= target).to(tl.uint32)
        digit += (tl.sum(reach_2, 0) >= target).to(tl.uint32)
        digit += (tl.sum(reach_3, 0) >= target).to(tl.uint32)
        threshold += digit * step
        step = step >> 2
    return tl.maximum(threshold, bound)


def sample_triton(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    block = min(_MAX_BLOCK, triton.next_power_of_2(vocab))
    values = torch.empty(num_rows, block, dtype=torch.float32, device=logits.device)
    lanes, ids = torch.empty(2, num_rows, block, dtype=torch.int32, device=logits.device)
    if num_rows:
        _sample_kernel[(num_rows,)](
            logits,
            slots,
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            position,
            lanes,
            values,
            ids,
            tokens,
            logits.stride(0),
            vocab,
            BLOCK=block,
            num_warps=16,
        )
    return tokens


def sample_torch(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """Return one token id per row; a row's token depends on that row alone.

    logits [num_rows, vocab] fp32; slots [num_rows] int64 names each row's parameters; position [num_rows]
    int64 is that of its new token; temperature, top_p, min_p [num_slots] fp32; top_k [num_slots] int32; seed
    [num_slots] int64; returns [num_rows] int64. Temperature below 1e-5 takes the most likely token, the
    lowest id among equals. Otherwise, over softmax(logits / temperature), a token is kept if it passes
    all three filters, and tokens as likely as one that is kept are kept too:

    - top-k: among the k most likely (0 = off);
    - top-p: in the smallest set of most likely tokens whose share of what top-k left reaches top_p (1 = off);
    - min-p: at least min_p times as likely as the most likely one (0 = off).

    The draw inverts the cumulative distribution over kept tokens in the order of their ids: the first id
    whose cumulative mass exceeds `uniform(seed, position)` times the total. A row without a finite maximum
    (it has NaN, or plus infinity, or nothing but minus infinity) gets -1.
    """
    temperature, top_k, top_p, min_p, seed = (t[slots] for t in (temperature, top_k, top_p, min_p, seed))
    greedy = temperature < GREEDY_BELOW
    if bool(greedy.all()):
        tokens = logits.argmax(-1)
        return torch.where(logits.gather(1, tokens.unsqueeze(1)).isfinite().squeeze(1), tokens, -1)
    tokens = _sample_mixed(logits, temperature, top_k, top_p, min_p, seed, position, greedy)
    return torch.where(logits.amax(-1).isfinite(), tokens, -1)


def _sample_mixed(logits, temperature, top_k, top_p, min_p, seed, position, greedy):
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
    """Draw from the candidates, and from the whole row only if they may not cover all kept tokens."""
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
        # Equals of the k-th that are no candidates are missing from the total that top-p is a share of.
        has_equals = (top_k > 0) & (weights[:, -1] >= _kth_weight(weights, top_k))
        more = (weights[:, -1] >= threshold) | (top_k >= num_candidates) | has_equals
        # Past a candidate of weight 0 there is nothing to draw.
        uncovered = (more & (weights[:, -1] > 0)).nonzero().squeeze(1)
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
    """Draw with the whole vocabulary as candidates: for flat distributions and very large k."""
    scaled = logits.sub(logits.amax(-1, keepdim=True)).div_(temperature.unsqueeze(1))
    weights = scaled.exp_()
    ordered = weights.sort(dim=-1, descending=True).values
    threshold = _threshold(ordered, ordered.sum(-1), top_k, top_p, min_p)
    weights = torch.where(weights >= threshold.unsqueeze(1), weights, 0)
    return _draw(weights, seed, position).squeeze(1)


def _threshold(weights, total, top_k, top_p, min_p):
    """Return the smallest weight that is kept, [rows]; weights [rows, n] descending from 1, total [rows]."""
    n = weights.shape[1]
    threshold = torch.where(top_k > 0, _kth_weight(weights, top_k), 0)
    kept = torch.where(weights >= threshold.unsqueeze(1), weights, 0).cumsum(-1, dtype=torch.float64)
    total = torch.where(top_k > 0, kept[:, -1], total)
    target = torch.where(top_p < 1, top_p * total, math.inf).unsqueeze(1)
    reached = (kept < target).sum(-1, keepdim=True).clamp_(max=n - 1)
    nucleus = torch.where(top_p < 1, weights.gather(1, reached).squeeze(1), 0)
    return torch.maximum(torch.maximum(threshold, nucleus), min_p)


def _kth_weight(weights, top_k):
    """Return the top_k-th of the descending weights [rows, n], [rows]: the last one if there are fewer."""
    n = weights.shape[1]
    last = torch.where(top_k > 0, top_k.clamp(max=n), n).to(torch.int64).sub_(1).unsqueeze(1)
    return weights.gather(1, last).squeeze(1)


def _draw(weights, seed, position):
    """Invert the cumulative distribution of weights [rows, n]; returns the index [rows, 1]."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1]
    target = uniform_torch(seed, position) * total
    # The product may round up to the total, beyond which no token lies.
    target = torch.minimum(target, torch.nextafter(total, total.new_zeros(())))
    # NaN weights give no valid index, but it must stay inside the table.
    return torch.searchsorted(cumulative, target.unsqueeze(1), right=True).clamp_(max=weights.shape[1] - 1)


def sample_cpu(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    return cpu.sample(logits, slots, temperature, top_k, top_p, min_p, seed, position, GREEDY_BELOW)


sample = dispatch(sample_triton, sample_torch, sample_cpu)
