"""Sums of a matrix product whose inputs are divided among programs (split-K).

The last program of a tile to arrive adds the parts, in order, so that the sum does not depend on which that
is, and nothing has to be launched after it.
"""

from functools import cache
from typing import NamedTuple

import torch

from kernels.dispatch import tl, triton

MANY_FEATURES = 20000  # from here on the tiles alone occupy all multiprocessors, with few parts or one
_MOST_TILES = 4096  # of a product whose inputs are divided


class Splits(NamedTuple):
    """How a product divides its inputs, and what `sum_of_splits` needs."""

    num_splits: int
    num_blocks: int  # of inputs in each part; the last may have fewer
    partial: torch.Tensor
    arrived: torch.Tensor


def split_inputs(
    num_splits: int, num_blocks: int, num_tiles: int, tile_size: int, dtype: torch.dtype, device: torch.device
) -> Splits:
    """Divide num_blocks blocks of inputs into at most num_splits parts.

    A product has num_tiles tiles of tile_size sums of a dtype; with too many tiles inputs are not divided.
    """
    split_blocks = triton.cdiv(num_blocks, num_splits if num_tiles <= _MOST_TILES else 1)
    num_splits = triton.cdiv(num_blocks, split_blocks)
    partial = arrived = _arrivals(device)
    if num_splits > 1:
        partial = torch.empty(num_splits * num_tiles * tile_size, dtype=dtype, device=device)
    return Splits(num_splits, split_blocks, partial, arrived)


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
def _arrivals(device: torch.device) -> torch.Tensor:
    """Return the counters of arrived parts, int32 [_MOST_TILES]: 0 whenever no product runs."""
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)
