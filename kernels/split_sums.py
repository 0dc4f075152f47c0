"""Sums of a matrix product whose inputs are divided among programs (split-K).

The last program of a tile to arrive adds the parts, in order, so that the sum does not depend on which that
is, and nothing has to be launched after it.
"""

from functools import cache

import torch

from kernels.dispatch import tl, triton

MOST_TILES = 4096  # of a product whose inputs are divided


@triton.jit
def sum_of_splits(acc, partial_ptr, arrived_ptr, NUM_SPLITS: tl.constexpr):
    """Return the sum [A, B] of this tile's parts, and True in the program that has it.

    Tiles are dimensions 0 and 1 of the grid, and parts dimension 2. partial [num_splits, num_tiles, A * B] in
    acc's dtype takes the parts, arrived int32 [num_tiles] counts them; it is 0 before and after.
    """
    is_last = True
    if NUM_SPLITS > 1:
        A: tl.constexpr = acc.shape[0]
        B: tl.constexpr = acc.shape[1]
        split = tl.program_id(2)
        # Tiles in any order, the same for stores and loads.
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        part_size = tl.num_programs(0) * tl.num_programs(1) * A * B
        place = tl.arange(0, A)[:, None] * B + tl.arange(0, B)[None, :]
        parts = partial_ptr + tile * A * B + place
        tl.store(parts + split * part_size, acc)
        tl.debug_barrier()  # all stores of this program become visible before its arrival
        is_last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") == NUM_SPLITS - 1
        if is_last:
            tl.store(arrived_ptr + tile, 0)  # ready for the next product
            acc = tl.load(parts, cache_modifier=".cg")
            for other in tl.static_range(1, NUM_SPLITS):
                acc += tl.load(parts + other * part_size, cache_modifier=".cg")
    return acc, is_last


@cache
def arrivals(device: torch.device) -> torch.Tensor:
    """Return the counters of arrived parts, int32 [MOST_TILES]: 0 whenever no product runs."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
