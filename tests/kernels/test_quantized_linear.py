"""The product of quantized activations against quantize_rows and the product in float64."""

import pytest
import torch

from kernels.quantize_rows import quantize_rows
from kernels.quantized_linear import quantized_linear
from tests.kernels.conftest import Target
from tests.kernels.tolerances import assert_close

KINDS = pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8], ids=str)
# (tokens, inputs, features): one token is multiplied without the matrix unit, unless features are many.
SHAPES = [(1, 8, 1), (1, 1000, 33), (1, 1024, 16), (5, 100, 20)]
LARGE = [(1, 4096, 6144), (1, 14336, 4096), (1, 4096, 28672), (16, 14336, 4096), (300, 4096, 4096)]


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_odd_shapes(target: Target, kind: torch.dtype, dtype: torch.dtype, scaled: bool):
    for num_tokens, in_features, out_features in SHAPES + LARGE * target.large:
        x = target.to(torch.randn(num_tokens, in_features).to(dtype))[0]
        weight, scale = quantize_rows(*target.to(torch.randn(out_features, in_features)), kind)
        bias = torch.randn(out_features, device=target.device).to(dtype)
        x_scale = torch.full((1,), 0.01, device=target.device) if scaled else None
        found = quantized_linear(x, weight, scale, bias, x_scale)
        assert found.dtype == dtype
        values, scales = quantize_rows(x, kind, x_scale)
        exact = (values.double() * scales[:, None]) @ (weight.double() * scale[:, None]).t() + bias.double()
        rounding = dtype if dtype != torch.float32 or target.device.type == "cpu" else torch.float16
        assert_close(found, exact, rounding, in_features)


@KINDS
def test_a_token_of_zeros_and_of_no_numbers(target: Target, kind: torch.dtype):
    x = torch.randn(3, 300)
    x[0] = 0
    x[1, 17] = torch.nan
    weight, scale = quantize_rows(*target.to(torch.randn(9, 300)), kind)
    zeros, nans, numbers = (quantized_linear(row[None], weight, scale) for row in target.to(x)[0])
    assert zeros.eq(0).all()
    assert nans.isnan().all()
    assert numbers.isfinite().all()


def test_no_tokens(target: Target):
    weight, scale = quantize_rows(*target.to(torch.randn(8, 64)), torch.int8)
    assert quantized_linear(*target.to(torch.empty(0, 64)), weight, scale).shape == (0, 8)
