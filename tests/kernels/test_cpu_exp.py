"""Covers kernels/cpu/exp.py."""

import pytest
import torch

from kernels.cpu.compiler import compiled, floats, is_available
from kernels.cpu.dot_products import num_lanes
from kernels.cpu.exp import exp

pytestmark = pytest.mark.skipif(not is_available(), reason="needs numba and libgomp")


@compiled()
def _exp_kernel(x_ptr, out_ptr, size):
    x, out = floats(x_ptr, 1, size)[0], floats(out_ptr, 1, size)[0]
    for i in range(size):
        out[i] = exp(x[i])


def exp_of(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _exp_kernel(x.data_ptr(), out.data_ptr(), x.numel())
    return out


def test_the_error_is_a_few_units_in_the_last_place():
    x = torch.linspace(-87, 88, 100003)
    exact = x.double().exp()
    limit = 4e-7 if num_lanes() else 5e-6  # without AVX2 there is no fused multiply-add
    assert ((exp_of(x).double() - exact).abs() / exact).max() < limit


def test_values_outside_the_range_become_zero_and_infinity_and_nan_stays():
    inf, nan = float("inf"), float("nan")
    results = exp_of(torch.tensor([-inf, -1000.0, -88.5, 89.0, 1000.0, inf, nan])).tolist()
    assert results[:6] == [0, 0, 0, inf, inf, inf]
    assert results[6] != results[6]
