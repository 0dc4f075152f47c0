"""The product with fp8 blocks against one in float64 with both sides dequantized."""

import pytest
import torch

from kernels import block_linear as module
from kernels.block_linear import BLOCK, LaunchShape, block_linear, block_linear_triton, launch_shape
from kernels.fp8_values import FP8
from kernels.quantize_rows import quantize_groups
from tests.kernels.conftest import Target
from tests.kernels.tolerances import assert_close

# (tokens, inputs, features, features of a scale): small ones, none a multiple of a tile, several tiles.
SHAPES = [(1, 8, 1, 1), (3, 100, 33, 11), (17, 256, 96, 32), (9, 300, 256, 128), (70, 520, 130, 2)]
LARGE = [
    (1, 4096, 6144, 128),
    (16, 14336, 4096, 128),
    (100, 2000, 8200, 8),
    (300, 4100, 1000, 1),
    (2048, 4096, 4096, 128),
]


def tensors(target: Target, num_tokens, in_features, out_features, rows, dtype):
    x = torch.randn(num_tokens, in_features).to(dtype)
    weight = (torch.randn(out_features, in_features) * 100).clamp(-448, 448).to(FP8)  # beyond is NaN
    scale = torch.rand(out_features // rows, -(-in_features // BLOCK)) * 0.001 + 1e-4
    return target.to(x, weight, scale)


def exact_product(x, weight, scale, quantizes=True):
    in_features = x.shape[1]
    blocks = scale.double().repeat_interleave(len(weight) // len(scale), 0).repeat_interleave(BLOCK, 1)
    if quantizes:
        values, x_scale = quantize_groups(x, FP8)
        x = values.double() * x_scale.double().repeat_interleave(BLOCK, 1)[:, :in_features]
    return x.double() @ (weight.double() * blocks[:, :in_features]).t()


def check(target: Target, *size, dtype=torch.float16, bias=True, **how):
    x, weight, scale = tensors(target, *size, dtype)
    exact = exact_product(x, weight, scale)
    added = None
    if bias:
        added = torch.randn(len(weight), device=target.device).to(dtype)
        exact += added.double()
    op = block_linear_triton if how else block_linear
    result = op(x, weight, scale, added, **how)
    assert result.dtype == dtype
    assert_close(result, exact, dtype, reduction=size[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_odd_shapes(target: Target, dtype: torch.dtype):
    if dtype == torch.float32 and target.device.type == "cuda":
        dtype = torch.float16  # the matrix unit's own sums are shorter than float32
    for shape in SHAPES + LARGE * target.large:
        check(target, *shape, dtype=dtype)


def test_without_bias(target: Target):
    check(target, 5, 72, 40, 8, bias=False)


@pytest.mark.parametrize("quantizes", [True, False])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_divided_inputs(target: Target, quantizes: bool, num_splits: int):
    if target.backend == "torch":
        pytest.skip("divides no inputs")
    for _ in range(2):  # the counters of arrived parts are 0 again
        check(target, 20, 700, 70, 35, shape=LaunchShape(16, 64, num_splits, 4, 2, quantizes))


@pytest.mark.parametrize("num_tokens", [1, 16, 32, 64, 256, 2048])
def test_every_tile(target: Target, num_tokens: int):
    """The tiles of a model's sizes, at a size that the interpreter can afford."""
    if target.backend == "torch":
        pytest.skip("has no tiles")
    shape = launch_shape(num_tokens, 6144, 4096)
    for rows in (128, 32):
        check(target, shape.block_m + 3, 2 * BLOCK + 8, 256, rows, shape=shape)


def test_both_ways_to_quantize_are_one(target: Target):
    if target.backend == "torch":
        pytest.skip("has one way")
    x, weight, scale = tensors(target, 7, 300, 70, 35, torch.float16)
    x[1] = 0
    x[2, 5] = torch.inf
    found = [
        block_linear_triton(x, weight, scale, shape=LaunchShape(8, 64, 1, 4, 2, quantizes))
        for quantizes in (True, False)
    ]
    assert torch.equal(found[0].nan_to_num(), found[1].nan_to_num())
    assert found[0][1].eq(0).all()
    assert found[0][2].isnan().all() and found[0][3:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_gpu_without_fp8_quantizes_no_activations(target: Target, dtype: torch.dtype, monkeypatch):
    if target.backend == "torch":
        pytest.skip("a CPU quantizes them")
    monkeypatch.setattr(module, "has_fp8", lambda device: False)
    monkeypatch.setattr(module, "loadable", lambda weight: weight.view(torch.uint8))
    x, weight, scale = tensors(target, 5, 300, 70, 35, dtype)
    exact = exact_product(x, weight, scale, quantizes=False)
    assert_close(block_linear_triton(x, weight, scale), exact, dtype, reduction=300)


def test_rows_of_a_wider_tensor(target: Target):
    x, weight, scale = tensors(target, 5, 320, 40, 40, torch.float32)
    part, weight, scale = x[:, 16:176], weight[:, :160].contiguous(), scale[:, :2].contiguous()
    torch.testing.assert_close(
        block_linear(part, weight, scale), block_linear(part.contiguous(), weight, scale)
    )


def test_no_tokens(target: Target):
    x, weight, scale = tensors(target, 0, 64, 8, 8, torch.float16)
    assert block_linear(x, weight, scale).shape == (0, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 16, 64])
def test_a_captured_product_follows_its_input(num_tokens: int):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x = torch.randn(num_tokens, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, 4096, device="cuda").to(FP8)
    scale = torch.rand(32, 32, device="cuda")
    block_linear(x, weight, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = block_linear(x, weight, scale)
    for seed in range(2):
        torch.manual_seed(seed)
        x.copy_(torch.randn(num_tokens, 4096))
        graph.replay()
        assert torch.equal(captured, block_linear(x, weight, scale))
