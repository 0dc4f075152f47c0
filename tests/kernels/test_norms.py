import pytest
import torch

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


def test_no_tokens(target: Target):
    x, weight = target.to(torch.empty(0, 64), torch.ones(64))
    assert rms_norm(x, weight, 1e-5).shape == (0, 64)
