"""Kernels of kernels/cpu/ compiled for older CPUs than this one, each in a process of its own."""

import os
import subprocess
import sys

import pytest

from kernels.cpu.dot_products import num_lanes

pytestmark = pytest.mark.skipif(not num_lanes(), reason="needs numba and a CPU with AVX2")

CODE = """
import torch
from kernels.cpu.dot_products import num_lanes
from kernels.cpu.kv_heads import INT8, read_scale, write_head
from kernels.eight_bit_linear import eight_bit_linear, eight_bit_linear_torch

x, weight = torch.randn(5, 70), torch.randint(-127, 128, (9, 70), dtype=torch.int8)
scale = torch.rand(9)
error = (eight_bit_linear(x, weight, scale) - eight_bit_linear_torch(x, weight, scale)).abs().max()
assert error < 0.1, error
x, keys, scales = torch.tensor([63.5, -127]), torch.zeros(2, dtype=torch.int8), torch.zeros(1).half()
write_head(x.data_ptr(), keys.data_ptr(), scales.data_ptr(), 1, INT8, 0, 2)
assert keys.tolist() == [64, -127] and scales.item() == 1 == read_scale(scales.data_ptr(), 1, 0), keys
print(num_lanes())
"""


@pytest.mark.parametrize(("cpu", "lanes"), [("x86-64", 0), ("haswell", 16)])
def test_the_kernels_fit_the_cpu_that_they_are_compiled_for(cpu, lanes):
    environment = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == lanes
