"""Covers kernels/cpu/team.py."""

import threading
import time

import numpy as np
import pytest

from kernels.cpu.compiler import compiled, is_available, set_num_threads

pytestmark = pytest.mark.skipif(not is_available(), reason="needs numba")
if is_available():
    from numba import prange

ASLEEP_AFTER_SECONDS = 0.05


@compiled(parallel=True)
def _count(counts, first, weight):
    for i in prange(first, len(counts)):
        counts[i] += weight


@compiled(parallel=True)
def _count_pairs(counts):
    counts[:] = counts + 1  # numba makes a loop over two indices of it


@pytest.fixture(autouse=True)
def two_threads():
    set_num_threads(2)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 8, 9, 1000])
def test_each_index_is_visited_once(size):
    for first in (0, 1):
        counts = np.zeros(size, np.int64)
        _count(counts, first, 3)
        assert (counts[first:] == 3).all() and (counts[:first] == 0).all()


def test_loops_over_two_indices():
    counts = np.zeros((37, 5), np.int64)
    _count_pairs(counts)
    assert (counts == 1).all()


def test_many_loops_with_and_without_sleep_between_them():
    counts = np.zeros(19, np.int64)
    for _ in range(2_000):
        _count(counts, 0, 1)
    for _ in range(3):
        time.sleep(ASLEEP_AFTER_SECONDS)
        _count(counts, 0, 1)
    assert (counts == 2_003).all()


def test_threads_that_call_at_the_same_time_do_not_disturb_each_other():
    results = [np.zeros(64, np.int64) for _ in range(4)]

    def call(counts):
        set_num_threads(2)
        for _ in range(500):
            _count(counts, 0, 1)

    threads = [threading.Thread(target=call, args=(counts,)) for counts in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((counts == 500).all() for counts in results)
