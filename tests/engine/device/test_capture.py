"""Batch sizes that get a CUDA graph."""

from bisect import bisect_left

import pytest

from engine.device.capture import ladder


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8, 17, 64, 100, 256, 257, 1000])
def test_every_batch_fits_a_graph_with_little_padding(max_num_seqs: int):
    sizes = ladder(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_num_seqs
    for num_rows in range(1, max_num_seqs + 1):
        padding = sizes[bisect_left(sizes, num_rows)] - num_rows
        assert padding < max(8, num_rows / 4), f"{num_rows} rows are padded by {padding}"


def test_graphs_are_few():
    """Each takes memory and a part of a second of the start."""
    assert len(ladder(256)) == 23
    assert len(ladder(1024)) == 35


def test_one_row_is_never_padded():
    assert all(ladder(max_num_seqs)[0] == 1 for max_num_seqs in (1, 5, 256))
