"""Covers kernels/cpu/compiler.py."""

import os
import subprocess
import sys

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


def test_without_compilation_the_twins_are_used():
    code = "import kernels.eight_bit_linear; from kernels.cpu import compiler; print(compiler.is_available())"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
