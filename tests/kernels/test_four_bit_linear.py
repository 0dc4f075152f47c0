"""Products with weights of four bits against one in float64 with the dequantized weight.

Covers kernels/four_bit_weight.py and kernels/four_bit_linear.py.
"""

import pytest
import torch

from kernels.four_bit_linear import LaunchShape, four_bit_linear, four_bit_linear_triton, launch_shape
from kernels.four_bit_weight import FourBitWeight, dequantize, num_tiles, pack_rows
from tests.kernels.conftest import Target
from tests.kernels.tolerances import assert_close

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
# (tokens, inputs, features): one of each, none a multiple of a tile, several tiles each way.
SHAPES = [(1, 32, 1), (3, 96, 33), (17, 512, 96), (70, 416, 200)]
LARGE = [(1, 4096, 6144), (16, 14336, 4096), (100, 2048, 8200), (300, 4128, 1000), (2000, 4096, 4096)]


def made(
    out_features, in_features, group_size, *, asymmetric=False, is_float=False, scale_dtype=torch.float16
):
    """A random weight, and its values in float64."""
    rows, inputs = num_tiles(out_features, in_features)
    codes = torch.randint(16, (out_features, in_features), dtype=torch.uint8)
    values = torch.zeros(rows * 32, inputs, 64, dtype=torch.uint8)
    values[:out_features] = pack_rows(codes)
    values = values.unflatten(0, (rows, 32)).transpose(1, 2).contiguous()
    num_groups = -(-inputs * 128 // group_size)
    scales = (torch.rand(num_groups, rows * 32) * 0.02 + 0.001).to(scale_dtype)
    zeros = torch.randint(17, scales.shape, dtype=torch.uint8) if asymmetric else None
    weight = FourBitWeight(values, scales, zeros, group_size, in_features, out_features, is_float)
    group = torch.arange(in_features) // group_size
    if is_float:
        exact = torch.tensor(FP4, dtype=torch.float64)[codes.int()]
    else:
        exact = codes.double() - (8 if zeros is None else zeros[group, :out_features].t().double())
    return weight, exact * scales[group, :out_features].t().double()


def moved(weight: FourBitWeight, target: Target) -> FourBitWeight:
    values, scales = target.to(weight.values, weight.scales)
    zeros = None if weight.zeros is None else weight.zeros.to(target.device)
    return weight._replace(values=values, scales=scales, zeros=zeros)


def check(
    target, num_tokens, in_features, out_features, dtype, group_size, with_bias=True, shape=None, **kind
):
    if dtype == torch.bfloat16 and target.backend == "triton" and target.device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16 matrices")
    weight, exact = made(out_features, in_features, group_size, **kind)
    weight = moved(weight, target)
    x = torch.randn(num_tokens, in_features + 8).to(dtype).to(target.device)[:, :in_features]
    bias = torch.randn(out_features).to(dtype).to(target.device) if with_bias else None
    if shape is None:
        result = four_bit_linear(x, weight, bias)
    else:
        result = four_bit_linear_triton(x, weight, bias, shape=shape)
    expected = x.cpu().double() @ exact.t()
    assert result.dtype == dtype
    assert_close(result, expected if bias is None else expected + bias.cpu().double(), dtype, in_features)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [32, 64, 128, 256, 1 << 20])
def test_odd_shapes(target: Target, dtype: torch.dtype, group_size: int):
    for shape in SHAPES + LARGE * target.large:
        check(target, *shape, dtype, group_size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("kind", [{"asymmetric": True}, {"is_float": True, "scale_dtype": torch.bfloat16}])
def test_zero_points_and_floats(target: Target, dtype: torch.dtype, group_size: int, kind):
    for shape in [*SHAPES[1:3], *(LARGE * target.large)]:
        check(target, *shape, dtype, group_size, with_bias=False, **kind)


@pytest.mark.parametrize("scale_sums", [True, False])
@pytest.mark.parametrize("num_splits", [1, 2, 3])
def test_parts_of_the_inputs_are_added(target: Target, scale_sums: bool, num_splits: int):
    if target.backend == "torch":
        pytest.skip("divides no inputs")
    for _ in range(2):  # the counters of parts are ready for another product
        shape = LaunchShape(16, 32, scale_sums, num_splits, 2, 3)
        check(target, 19, 600, 70, torch.float16, 128, asymmetric=True, shape=shape)


@pytest.mark.parametrize("out_features", [64, 28672])
@pytest.mark.parametrize("num_tokens", [1, 16, 32, 64, 128, 256])
def test_every_launch(target: Target, num_tokens: int, out_features: int):
    """The launches of 16-bit activations, at a size the interpreter can afford."""
    if target.backend == "torch":
        pytest.skip("has no launches")
    shape = launch_shape(num_tokens, out_features, 1024, 2)
    features = out_features if target.large else shape.block_n + 5
    for group_size in (32, 64, 128):
        check(target, num_tokens, 1024, features, torch.float16, group_size, shape=shape)
        if target.large:
            check(target, num_tokens, 1024, features, torch.bfloat16, group_size, shape=shape)


def test_many_tokens_multiply_chunks_of_the_weight(target: Target, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kernels.four_bit_linear._CHUNK_BYTES", 2 * 200 * 32 * 2)
    check(target, 600, 200, 139, torch.float16, 64, asymmetric=True)


def test_no_tokens(target: Target):
    weight, _ = made(8, 64, 64)
    assert four_bit_linear(torch.empty(0, 64, device=target.device), moved(weight, target)).shape == (0, 8)


@pytest.mark.parametrize("kind", [{}, {"asymmetric": True}, {"is_float": True}])
@pytest.mark.parametrize("group_size", [32, 64, 256])
def test_dequantizes(target: Target, group_size: int, kind):
    weight, exact = made(37, 416, group_size, scale_dtype=torch.float32, **kind)
    found = dequantize(moved(weight, target), torch.float32)
    torch.testing.assert_close(found.cpu(), exact.float(), rtol=1e-6, atol=0)
