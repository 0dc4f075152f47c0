"""Rows of an embedding table of int8 values with one float32 scale per row.

For 16 rows of 576 values torch takes 44 µs on two cores, with threads that sleep when idle, compiled code 3.
"""

from torch import Tensor

from kernels.cpu import embedding_rows as cpu
from kernels.dispatch import dispatch


def embedding_rows_torch(scale: Tensor, values: Tensor, indices: Tensor) -> Tensor:
    """Return `values[indices] * scale[indices]`, fp32 [n, size].

    scale fp32 [num_rows], values int8 [num_rows, size], indices int64 [n]: all below num_rows.
    """
    return values[indices].float() * scale[indices, None]


# A GPU has torch's operations, too: int8 tables are those of models in float32, which are computed on CPUs.
embedding_rows = dispatch(embedding_rows_torch, embedding_rows_torch, cpu.embedding_rows)
