"""The product of 8-bit values against one in float64 with both sides dequantized.

Covers kernels/scaled_linear.py and kernels/split_sums.py.
"""

import pytest
import torch

from kernels.quantize_rows import quantize_rows
from kernels.scaled_linear import LaunchShape, launch_shape, scaled_linear, scaled_linear_triton
from tests.kernels.conftest import Target
from tests.kernels.tolerances import assert_close

KINDS = pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8], ids=str)
# (tokens, inputs, features): one of each, none a multiple of a tile, several tiles each way.
SHAPES = [(1, 8, 1), (3, 100, 33), (17, 256, 96), (70, 1100, 130)]
LARGE = [(1, 4096, 6144), (16, 14336, 4096), (100, 2048, 8200), (300, 4100, 1000), (2048, 4096, 4096)]


def check(target: Target, num_tokens, in_features, out_features, kind, dtype=torch.float16, bias=True, **how):
    values, x_scale = quantize_rows(*target.to(torch.randn(num_tokens, in_features)), kind)
    weight, weight_scale = quantize_rows(*target.to(torch.randn(out_features, in_features) * 0.02), kind)
    exact = (values.double() * x_scale[:, None].double()) @ (weight.double() * weight_scale[:, None]).t()
    added = None
    if bias:
        added = torch.randn(out_features, device=target.device).to(dtype)
        exact += added.double()
    op = scaled_linear_triton if how else scaled_linear
    result = op(values, x_scale, weight, weight_scale, added, dtype, **how)
    assert result.dtype == dtype
    assert_close(result, exact, dtype, reduction=in_features)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_odd_shapes(target: Target, kind: torch.dtype, dtype: torch.dtype):
    if dtype == torch.float32 and kind == torch.float8_e4m3fn and target.device.type == "cuda":
        dtype = torch.float16  # the matrix unit's own sums are shorter than float32
    for shape in SHAPES + LARGE * target.large:
        check(target, *shape, kind, dtype)


@KINDS
def test_without_bias(target: Target, kind: torch.dtype):
    check(target, 5, 72, 40, kind, bias=False)


@KINDS
@pytest.mark.parametrize("weight_left", [False, True])
@pytest.mark.parametrize("num_splits", [1, 2, 3])
def test_divided_inputs(target: Target, kind: torch.dtype, num_splits: int, weight_left: bool):
    if target.backend == "torch":
        pytest.skip("divides no inputs")
    for _ in range(2):  # the counters of arrived parts are 0 again
        check(target, 20, 300, 70, kind, shape=LaunchShape(16, 64, 128, weight_left, num_splits, 4, 2))


@KINDS
@pytest.mark.parametrize("num_tokens", [1, 16, 32, 64, 256, 2048])
def test_every_tile(target: Target, kind: torch.dtype, num_tokens: int):
    """The tiles of a model's sizes, at a size that the interpreter can afford."""
    if target.backend == "torch":
        pytest.skip("has no tiles")
    shape = launch_shape(num_tokens, 6144, 4096)
    check(target, shape.block_m + 3, 2 * shape.block_k + 8, shape.block_n + 5, kind, shape=shape)


@KINDS
def test_rows_of_a_wider_tensor(target: Target, kind: torch.dtype):
    values, x_scale = quantize_rows(*target.to(torch.randn(5, 160)), kind)
    weight, weight_scale = quantize_rows(*target.to(torch.randn(40, 80)), kind)
    part = values[:, 16:96]
    expected = scaled_linear(part.contiguous(), x_scale, weight, weight_scale, None, torch.float32)
    result = scaled_linear(part, x_scale, weight, weight_scale, None, torch.float32)
    torch.testing.assert_close(result, expected)


@KINDS
def test_rows_of_zeros_and_of_no_numbers(target: Target, kind: torch.dtype):
    x = torch.randn(4, 64)
    x[1] = 0
    x[2, 5] = torch.inf
    values, x_scale = quantize_rows(*target.to(x), kind)
    weight, weight_scale = quantize_rows(*target.to(torch.randn(9, 64)), kind)
    result = scaled_linear(values, x_scale, weight, weight_scale, None, torch.float32)
    assert result[[0, 3]].isfinite().all()
    assert result[1].eq(0).all()
    assert result[2].isnan().all()


@KINDS
def test_no_tokens(target: Target, kind: torch.dtype):
    values, x_scale = quantize_rows(*target.to(torch.empty(0, 64)), kind)
    weight, weight_scale = quantize_rows(*target.to(torch.randn(8, 64)), kind)
    assert scaled_linear(values, x_scale, weight, weight_scale, None, torch.float16).shape == (0, 8)


@pytest.mark.gpu
@KINDS
def test_a_captured_product_follows_its_input(kind: torch.dtype):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    weight, weight_scale = quantize_rows(torch.randn(4096, 4096, device="cuda"), kind)

    def product() -> torch.Tensor:
        return scaled_linear(*quantize_rows(x, kind), weight, weight_scale, None, x.dtype)

    product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product()
    for seed in range(2):
        torch.manual_seed(seed)
        x.copy_(torch.randn(16, 4096))
        graph.replay()
        assert torch.equal(captured, product())
