"""Merges what a query gets from each split of its keys, in their order (Milakov and Gimelshein, 2018).

Decode and prefill attention do this with the same functions: a token's result does not depend on how many
tokens of its sequence are computed in a step, bit for bit. So operations on floats keep their order here.
Sums alone are added in two places: by `merge` in decode, and in prefill by the product that computes them.

What a query has seen is a peak, its largest score; the total of its weights e^(score - peak); and sums,
float32 [size], of the weighted values.
"""

import numpy as np

from kernels.cpu.compiler import compiled, floats
from kernels.cpu.exp import exp

_ZERO, _ONE, _NO_PEAK = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)


@compiled(exact=True)
def begin(sums_ptr, size, sink_ptr):
    """Write the sums before any split; returns peak and total, of the sink at an address if it is not 0."""
    sums = floats(sums_ptr, 1, size)[0]
    for i in range(size):
        sums[i] = _ZERO
    peak = floats(sink_ptr, 1, 1)[0, 0] if sink_ptr else _NO_PEAK
    return peak, _ONE if peak > _NO_PEAK else _ZERO


@compiled(exact=True)
def include(peak, total, split_peak, split_total):
    """Add the weights of a split to others.

    Returns peak and total of both, and factors of the sums before and of the sums of the split.
    """
    largest = max(peak, split_peak)
    less = exp(min(peak, split_peak) - largest)
    before, added = (less, _ONE) if peak < split_peak else (_ONE, less)
    return largest, total * before + split_total * added, before, added


@compiled(exact=True)
def merge(peak, total, sums_ptr, size, split_peak, split_total, split_sums_ptr):
    """Add a split to what a query has seen, as `multiply` with factors does it; returns peak and total."""
    sums, split_sums = floats(sums_ptr, 1, size)[0], floats(split_sums_ptr, 1, size)[0]
    peak, total, before, added = include(peak, total, split_peak, split_total)
    for i in range(size):
        sums[i] = sums[i] * before + split_sums[i] * added
    return peak, total


@compiled(exact=True)
def finish(total, sums_ptr, size, out_ptr):
    """Write the mean of the values, float32 [size]; `out_ptr` may be `sums_ptr`."""
    sums, out = floats(sums_ptr, 1, size)[0], floats(out_ptr, 1, size)[0]
    factor = _ONE / total
    for i in range(size):
        out[i] = sums[i] * factor
