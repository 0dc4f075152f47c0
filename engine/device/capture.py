"""What CUDA graphs of decode steps and of steps with prompts share."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

# Rows of the staging tensor, int64 [3, max_num_seqs]: what sampling reads of each row, and decode graphs.
SLOTS, POSITIONS, NEW_PAGES = range(3)

T = TypeVar("T")


def capture(pool: Any, compute: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Return the launches of a call as a graph with its memory in `pool`, and the call's result."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
        result = compute()
    return graph, result


def ladder(max_num_seqs: int) -> list[int]:
    """Return the batch sizes that get a graph: padding costs at most an eighth where a step is short."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs + 1, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]
