"""The product with weights of int8 or fp8 against one in float64 with the dequantized weight.

Covers kernels/cpu/eight_bit_linear.py and kernels/cpu/dot_products.py.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import dot_products
from kernels.cpu.eight_bit_linear import eight_bit_linear as eight_bit_linear_cpu
from kernels.eight_bit_linear import eight_bit_linear as eight_bit_linear_exact
from kernels.eight_bit_linear import eight_bit_linear_rounded as eight_bit_linear
from kernels.eight_bit_linear import eight_bit_linear_torch, eight_bit_linear_triton, launch_shape
from tests.kernels.conftest import Target
from tests.kernels.tolerances import assert_close

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# (tokens, inputs, features): one of each, none a multiple of a tile, several tiles each way.
SHAPES = [(1, 8, 1), (3, 100, 33), (17, 256, 96), (65, 130, 200)]
LARGE = [
    (1, 4096, 6144),
    (16, 14336, 4096),
    (50, 4096, 6144),
    (64, 2048, 28672),
    (100, 2048, 8200),
    (1000, 4100, 1000),
    (8192, 4096, 4096),
]


def check(
    target: Target,
    num_tokens,
    in_features,
    out_features,
    dtype,
    with_bias=True,
    strided=False,
    kind=torch.int8,
    **how,
):
    if dtype == torch.bfloat16 and target.backend == "triton" and target.device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16 matrices")
    x = torch.randn(num_tokens, in_features * (1 + strided)).to(dtype)[:, :in_features]
    weight = torch.randint(-127, 128, (out_features, in_features)).float().to(kind)
    scale = torch.rand(out_features) * 0.02
    bias = torch.randn(out_features).to(dtype) if with_bias else None
    device_x, device_weight, device_scale = target.to(x, weight, scale)
    if strided:
        device_x = target.to(torch.cat((x, x), 1))[0][:, :in_features]
    op = eight_bit_linear_triton if how else eight_bit_linear
    device_bias = None if bias is None else bias.to(target.device)
    result = op(device_x, device_weight, device_scale, device_bias, **how)
    exact = x.to(target.device).double() @ (device_weight.double() * device_scale.double()[:, None]).t()
    if device_bias is not None:
        exact += device_bias.double()
    assert result.dtype == dtype
    if target.backend == "cpu" and dtype == torch.float32:
        # Each activation is off by at most half a unit of the token's 14 bits.
        unit = x.abs().amax(1, keepdim=True) / 8191
        bound = 0.5 * unit.double() * (device_weight.double().abs().sum(1) * device_scale.double()) + 1e-5
        assert ((result - exact).abs() <= bound).all(), ((result - exact).abs() / bound).max()
        return
    assert_close(result, exact, dtype, reduction=in_features)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_odd_shapes(target: Target, dtype: torch.dtype, with_bias: bool):
    for shape in SHAPES + LARGE * target.large:
        check(target, *shape, dtype, with_bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("has_fp8", [True, False])
def test_fp8(target: Target, dtype: torch.dtype, has_fp8: bool, monkeypatch):
    """On GPUs with fp8 and on those that read its bits."""
    monkeypatch.setattr("kernels.fp8_values.has_fp8", lambda _device: has_fp8)
    for shape in SHAPES + LARGE * target.large:
        check(target, *shape, dtype, kind=torch.float8_e4m3fn)


def test_rows_of_a_wider_tensor(target: Target):
    check(target, 5, 72, 40, torch.float16, strided=True)


@pytest.mark.parametrize("out_features", [64, 28672])
@pytest.mark.parametrize("num_tokens", [16, 64, 65])
def test_every_tile(target: Target, num_tokens: int, out_features: int):
    """The tiles of 16-bit activations, at a size the interpreter can afford."""
    if target.backend != "triton":
        pytest.skip("has no tiles")
    shape = launch_shape(num_tokens, out_features, 2)
    check(target, num_tokens + 3, shape.block_k + 8, shape.block_n + 5, torch.float16, shape=shape)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_rows_that_are_dequantized(target: Target, kind: torch.dtype, monkeypatch):
    """Many tokens, three rows of the weight at a time."""
    monkeypatch.setattr("kernels.eight_bit_linear._CHUNK_BYTES", 3 * 2 * 90)
    check(target, 256, 90, 8, torch.float16, kind=kind)


def test_no_tokens(target: Target):
    x, weight, scale = target.to(torch.empty(0, 64), torch.zeros(8, 64, dtype=torch.int8), torch.ones(8))
    assert eight_bit_linear(x, weight, scale).shape == (0, 8)


@pytest.mark.gpu
def test_a_captured_product_follows_its_input():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randint(-127, 128, (4096, 4096), dtype=torch.int8, device="cuda")
    scale = torch.rand(4096, device="cuda")
    eight_bit_linear(x, weight, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = eight_bit_linear(x, weight, scale)
    for seed in range(2):
        torch.manual_seed(seed)
        x.copy_(torch.randn(16, 4096))
        graph.replay()
        assert torch.equal(captured, eight_bit_linear(x, weight, scale))


def test_weights_that_are_stored_round_only_activations_in_bfloat16(target: Target):
    if target.backend != "cpu" or not dot_products.num_lanes():
        pytest.skip("of the compiled product")
    x, weight = torch.randn(5, 64), torch.randint(-127, 128, (8, 64), dtype=torch.int8)
    scale, bias = torch.rand(8), torch.randn(8)
    exact = eight_bit_linear_torch(x, weight, scale, bias)
    assert torch.equal(eight_bit_linear_exact(x, weight, scale, bias), exact)
    narrow = (x.bfloat16(), weight, scale, bias.bfloat16())
    of_floats = eight_bit_linear(narrow[0].float(), weight, scale, narrow[3].float())
    assert torch.equal(eight_bit_linear_exact(*narrow), of_floats.bfloat16())


def exact_product(x, weight, scale, bias):
    """Return the product of integers: exact sums of up to 2,048 products, summed and scaled in float32."""
    parts = zip(x.double().split(2048, 1), weight.double().split(2048, 1), strict=True)
    total = sum((some @ rows.t()).float() for some, rows in parts)
    return total * scale if bias is None else total * scale + bias


def integers(num_tokens, in_features):
    """Return activations that the compiled product does not round."""
    x = torch.randint(-8191, 8192, (num_tokens, in_features)).float()
    x[:, 0] = 8191.0
    return x


needs_vectors = pytest.mark.skipif(not dot_products.num_lanes(), reason="needs numba and AVX2")


@needs_vectors
@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.integers(1, 40),
    in_features=st.integers(1, 200) | st.sampled_from([576, 2048, 2080, 4200]),
    out_features=st.integers(1, 75),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_compiled_products_are_exact(num_tokens, in_features, out_features, with_bias, seed):
    """At sizes that fill tiles and vectors and at those that do not, to the last bit."""
    torch.manual_seed(seed)
    x = integers(num_tokens, in_features)
    weight = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8)
    scale, bias = torch.rand(out_features), torch.randn(out_features) if with_bias else None
    result = eight_bit_linear_cpu(x, weight, scale, bias)
    assert torch.equal(result, exact_product(x, weight, scale, bias))


@needs_vectors
@pytest.mark.parametrize("value", [-128, 127])
def test_the_largest_sums_fit(value: int):
    x, weight = torch.full((3, 4096), 8191.0), torch.full((8, 4096), value, dtype=torch.int8)
    result = eight_bit_linear_cpu(x, weight, torch.ones(8))
    assert torch.equal(result, torch.full((3, 8), 8191.0 * value * 4096))


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(1, 1), (4, 1), (4, 2), (4, 6)])
@pytest.mark.parametrize("lanes", [16, 32])
def test_tiles_of_either_width(lanes: int, num_rows: int, num_tokens: int, monkeypatch):
    """Vectors of AVX2 are also those of a CPU that has wider ones."""
    if dot_products.num_lanes() < lanes:
        pytest.skip("this CPU has no vectors of that width")
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(dot_products, "num_lanes", lambda: lanes)
    dot = dot_products.dot_tile(num_rows, num_tokens)

    @numba.njit
    def tile(x, weight, out, token_scales, row_scales, has_bias, bias):
        dot(x, weight, 2080, 2080, out, 5, token_scales, row_scales, has_bias, bias)

    x, weight = integers(num_tokens, 2080), torch.randint(-127, 128, (num_rows, 2080), dtype=torch.int8)
    scale, bias, token_scales = torch.rand(num_rows), torch.randn(num_rows), torch.ones(num_tokens)
    values, out = x.to(torch.int16), torch.zeros(num_tokens, 5)
    for has_bias in (False, True):
        addresses = (tensor.data_ptr() for tensor in (values, weight, out, token_scales, scale))
        tile(*addresses, has_bias, bias.data_ptr())
        expected = exact_product(x, weight, scale, bias if has_bias else None)
        assert torch.equal(out[:, :num_rows], expected)
        assert not out[:, num_rows:].any(), "writes beside the tile"


SHAPES_OF_ONE_TOKEN = [(64, 7), (72, 40), (576, 130), (4200, 9)]


@pytest.mark.parametrize("shape", SHAPES_OF_ONE_TOKEN, ids=str)
def test_a_token_has_the_same_result_alone_and_among_others(target: Target, shape: tuple[int, int]):
    """Bit for bit: sums are exact, wherever the compiled product is used."""
    if target.backend != "cpu" or not dot_products.num_lanes():
        pytest.skip("sums of floats depend on their order")
    in_features, out_features = shape
    x = torch.randn(11, in_features)
    weight = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8)
    scale, bias = torch.rand(out_features), torch.randn(out_features)
    together = eight_bit_linear(x, weight, scale, bias)
    alone = [eight_bit_linear(token[None], weight, scale, bias) for token in x]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")], ids=str)
def test_only_the_token_with_a_value_that_is_not_finite_is_nan(target: Target, value: float):
    if target.backend != "cpu" or not dot_products.num_lanes():
        pytest.skip("of the compiled product")
    x = torch.randn(5, 64)
    x[2, 63] = value
    result = eight_bit_linear(x, torch.ones(8, 64, dtype=torch.int8), torch.ones(8))
    assert result.isnan().all(1).tolist() == [False, False, True, False, False]


def test_tokens_of_zeros_have_results_of_zero(target: Target):
    weight = torch.ones(8, 64, dtype=torch.int8)
    result = eight_bit_linear(*target.to(torch.zeros(5, 64), weight, torch.ones(8)))
    assert not result.any()
