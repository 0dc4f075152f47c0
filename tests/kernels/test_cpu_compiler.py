"""Covers kernels/cpu/compiler.py."""

import pytest
import torch

from kernels.cpu.compiler import compiled, floats, int8s, is_available, set_num_threads

pytestmark = pytest.mark.skipif(not is_available(), reason="needs numba")


@compiled()
def _add_kernel(x_ptr, x_stride, y_ptr, out_ptr, rows, columns):
    x, y, out = floats(x_ptr, rows, x_stride), int8s(y_ptr, rows, columns), floats(out_ptr, rows, columns)
    for i in range(rows):
        for j in range(columns):
            out[i, j] = x[i, j] + y[i, j]


def test_kernels_read_rows_at_a_stride():
    x, y = torch.randn(3, 10)[:, :7], torch.randint(-128, 127, (3, 7), dtype=torch.int8)
    out = torch.empty(3, 7)
    _add_kernel(x.data_ptr(), x.stride(0), y.data_ptr(), out.data_ptr(), 3, 7)
    assert torch.equal(out, x + y)


def test_more_threads_than_cores_are_not_an_error():
    set_num_threads(1000)


def test_kernels_are_compiled_where_no_cache_can_be_written(monkeypatch):
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    twice = compiled()(lambda x: 2 * x)
    assert twice(3) == 6
