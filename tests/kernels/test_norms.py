"""Covers kernels/rms_norm.py, kernels/layer_norm.py and kernels/cpu/rms_norm.py."""

import pytest
import torch

from kernels.cpu.compiler import is_available
from kernels.layer_norm import add_layer_norm, layer_norm
from kernels.rms_norm import add_rms_norm, rms_norm
from tests.kernels.conftest import Target
from tests.kernels.tolerances import assert_close

SHAPES = [(1, 64), (3, 576), (5, 100), (2, 2049)]
LARGE = [(64, 4096), (1000, 2048), (7, 16384)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def inputs(shape, dtype):
    """A strided x (half of a wider tensor), a residual and a weight around 1."""
    num_tokens, hidden = shape
    x = torch.randn(num_tokens, 2 * hidden).to(dtype)[:, :hidden]
    return x, torch.randn(shape).to(dtype), (1 + 0.1 * torch.randn(hidden)).to(dtype)


def exact_rms_norm(x, weight, eps):
    x = x.double()
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(target: Target, dtype: torch.dtype):
    for shape in SHAPES + LARGE * target.large:
        x, _, weight = inputs(shape, dtype)
        result = rms_norm(*target.to(x, weight), 1e-5)
        assert result.dtype == dtype
        assert_close(result, exact_rms_norm(x, weight, 1e-5), dtype, reduction=shape[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_updates_the_residual(target: Target, dtype: torch.dtype):
    for shape in SHAPES + LARGE * target.large:
        x, residual, weight = inputs(shape, dtype)
        total = x + residual
        device_x, device_residual, device_weight = target.to(x, residual.clone(), weight)
        result = add_rms_norm(device_x, device_residual, device_weight, 1e-5)
        # Not compared bit for bit: Triton's interpreter does not round to nearest in bfloat16.
        assert_close(device_residual, total, dtype)
        assert_close(result, exact_rms_norm(total, weight, 1e-5), dtype, reduction=shape[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [rms_norm, layer_norm], ids=["rms", "layer"])
def test_what_is_added_is_multiplied(target: Target, op, dtype: torch.dtype):
    x, residual, weight = inputs((3, 576), dtype)
    total = x * 0.22 + residual
    device_x, device_residual, device_weight = target.to(x, residual.clone(), weight)
    if op is rms_norm:
        result = add_rms_norm(device_x, device_residual, device_weight, 1e-5, 0.22)
        exact = exact_rms_norm(total, weight, 1e-5)
    else:
        result = add_layer_norm(device_x, device_residual, device_weight, None, 1e-5, 0.22)
        exact = exact_layer_norm(total, weight, None, 1e-5)
    assert_close(device_residual, total, dtype)
    assert_close(result, exact, dtype, reduction=576)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_weight_in_fp32_multiplies_before_the_rounding(target: Target, dtype: torch.dtype):
    """A value that is rounded before it meets its weight is off by up to two units of the dtype."""
    x = torch.randn(4, 1000).to(dtype)
    weight = 1 + torch.rand(1000)
    result = rms_norm(*target.to(x, weight), 1e-5)
    exact = exact_rms_norm(x, weight, 1e-5)
    assert result.dtype == dtype
    unit = torch.finfo(dtype).eps / 2
    # One rounding; the interpreter truncates bfloat16, which costs twice as much.
    assert ((result.cpu().double() - exact).abs() <= (2.02 * unit) * exact.abs() + 1e-6).all()
    device_x, device_residual, device_weight = target.to(x, torch.zeros_like(x), weight)
    assert torch.equal(add_rms_norm(device_x, device_residual, device_weight, 1e-5), result)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fp32_weight", [False, True])
@pytest.mark.parametrize("multiplier", [1.0, 0.22])
def test_what_is_added_is_normalised_first(target: Target, dtype: torch.dtype, fp32_weight, multiplier):
    """As unfused: the norm, then the addition, then the norm of the sum or the sum itself."""
    for shape in SHAPES + LARGE * target.large:
        x, residual, weight = inputs(shape, dtype)
        x_weight = 1 + torch.randn(shape[1])
        if not fp32_weight:
            x_weight = x_weight.to(dtype)
        on_device = target.to(x, weight, x_weight)
        for out_weight in (on_device[1], None):
            (stream,) = target.to(residual.clone())
            result = add_rms_norm(on_device[0], stream, out_weight, 1e-5, multiplier, on_device[2])
            total = exact_rms_norm(x, x_weight, 1e-5) * multiplier + residual.double()
            assert_close(stream, total, dtype, reduction=shape[1])
            if out_weight is None:
                assert result is stream
            else:
                exact = exact_rms_norm(stream.cpu(), weight, 1e-5)
                assert_close(result, exact, dtype, reduction=shape[1])


def exact_layer_norm(x, weight, bias, eps):
    bias = None if bias is None else bias.double()
    return torch.layer_norm(x.double(), weight.shape, weight.double(), bias, eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm(target: Target, has_bias, dtype: torch.dtype):
    for shape in SHAPES + LARGE * target.large:
        x, residual, weight = inputs(shape, dtype)
        x += 3  # a mean that matters
        bias = torch.randn(shape[1]).to(dtype) if has_bias else None
        device_x, device_residual, device_weight = target.to(x, residual.clone(), weight)
        device_bias = None if bias is None else bias.to(target.device)
        exact = exact_layer_norm(x, weight, bias, 1e-5)
        result = layer_norm(device_x, device_weight, device_bias, 1e-5)
        assert_close(result, exact, dtype, reduction=shape[1], scale=4 + exact.abs().max().item())
        result = add_layer_norm(device_x, device_residual, device_weight, device_bias, 1e-5)
        exact = exact_layer_norm(x + residual, weight, bias, 1e-5)
        assert_close(device_residual, x + residual, dtype)
        assert_close(result, exact, dtype, reduction=shape[1], scale=4 + exact.abs().max().item())


def test_no_tokens(target: Target):
    x, weight = target.to(torch.empty(0, 64), torch.ones(64))
    assert rms_norm(x, weight, 1e-5).shape == (0, 64)
    assert layer_norm(x, weight, None, 1e-5).shape == (0, 64)


@pytest.mark.skipif(not is_available(), reason="needs numba and libgomp")
def test_a_row_does_not_depend_on_how_many_there_are():
    x, residual, weight = inputs((1001, 100), torch.float32)  # enough values for several threads
    row, row_residual = x[7:8], residual[7:8].clone()
    assert torch.equal(rms_norm(x, weight, 1e-5)[7], rms_norm(row, weight, 1e-5)[0])
    result = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(result[7], add_rms_norm(row, row_residual, weight, 1e-5)[0])
    assert torch.equal(residual[7], row_residual[0])
