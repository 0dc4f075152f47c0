"""Every packed layout against a float64 product."""

import pytest
import torch

from kernels.linear import OneDnnWeight, PlainWeight, WidenedWeight, linear, pack_weight

# A product of n terms in float32 carries a relative error of about sqrt(n) * 2^-24; the result is then
# rounded to the dtype: half a unit in its last place, and the same again for a bias added after rounding.
UNIT = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def assert_product(packed, weight, x, bias):
    out = linear(x, packed, bias)
    exact = x.double() @ weight.double().t()
    size = x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    assert out.dtype == x.dtype
    assert out.shape == exact.shape
    bound = 2 * UNIT[x.dtype] * (exact.abs() + 1e-3) + x.shape[1] ** 0.5 * 2**-23 * size
    worst = ((out.double() - exact).abs() / bound).max()
    assert worst <= 1, f"error is {worst:.2f} times the bound"


@pytest.mark.parametrize("rows", [1, 3, 4, 17])
@pytest.mark.parametrize(("n", "k"), [(1, 8), (96, 80), (5000, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_pack_weight_product(rows, n, k, dtype, with_bias):
    torch.manual_seed(0)
    weight, x = torch.randn(n, k).to(dtype), torch.randn(rows, k).to(dtype)
    bias = torch.randn(n).to(dtype) if with_bias else None
    with torch.inference_mode():
        assert_product(pack_weight(weight), weight, x, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_widened_weight_on_any_cpu(dtype):
    """The road of CPUs without 16-bit arithmetic, taken on any CPU; tiles do not divide N."""
    torch.manual_seed(0)
    weight, x, bias = (
        torch.randn(3001, 1000).to(dtype),
        torch.randn(6, 1000).to(dtype),
        torch.randn(3001).to(dtype),
    )
    assert_product(WidenedWeight(weight), weight, x, bias)


def test_plain_weight_shares_storage():
    weight = torch.randn(4, 8, dtype=torch.float64)
    packed = pack_weight(weight)
    assert type(packed) is PlainWeight
    assert packed.weight.data_ptr() == weight.data_ptr()


def test_sixteen_bit_weights_get_no_float32_copy():
    weight = torch.randn(64, 64).bfloat16()
    packed = pack_weight(weight)
    if isinstance(packed, OneDnnWeight):
        assert packed.blocked.dtype == torch.bfloat16
    else:
        assert isinstance(packed, WidenedWeight)
        assert packed.weight.data_ptr() == weight.data_ptr()


def test_strided_input_rows():
    """A slice of a wider tensor, as the parts of a fused projection are."""
    torch.manual_seed(0)
    weight, wide = torch.randn(32, 48), torch.randn(5, 96)
    assert_product(pack_weight(weight), weight, wide[:, 48:], None)
