import pytest
import torch

from kernels.act_mul import gelu_mul, gelu_tanh_mul, silu_mul
from kernels.cpu.compiler import is_available
from tests.kernels.conftest import Target
from tests.kernels.tolerances import assert_close

# The interpreter computes with numpy, which warns where a GPU silently gives the infinity that is wanted.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

SHAPES = [(1, 1), (3, 1536), (2, 100), (5, 1025)]
OPS = [silu_mul, gelu_mul, gelu_tanh_mul]
LARGE = [(64, 14336), (2048, 8192)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS, ids=["silu", "gelu", "gelu_tanh"])
def test_gated_activation(target: Target, op, dtype: torch.dtype):
    for num_tokens, intermediate in SHAPES + LARGE * target.large:
        gate_up = (3 * torch.randn(num_tokens, 2 * intermediate)).to(dtype)
        gate, up = gate_up.double().chunk(2, -1)
        if op is silu_mul:
            exact = torch.nn.functional.silu(gate) * up
        else:
            approximate = "tanh" if op is gelu_tanh_mul else "none"
            exact = torch.nn.functional.gelu(gate, approximate=approximate) * up
        result = op(gate_up.to(target.device))
        assert result.dtype == dtype
        assert_close(result, exact, dtype)


@pytest.mark.parametrize("op", OPS, ids=["silu", "gelu", "gelu_tanh"])
def test_large_gates(target: Target, op):
    gate_up = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]], device=target.device)
    assert op(gate_up).tolist() == [[0.0, 0.0, 0.0, 90.0, 1e4]]


@pytest.mark.skipif(not is_available(), reason="needs numba and libgomp")
@pytest.mark.parametrize("op", [silu_mul, gelu_tanh_mul], ids=["silu", "gelu_tanh"])
def test_a_row_does_not_depend_on_how_many_there_are(op):
    gate_up = torch.randn(1001, 2 * 100)  # enough values for several threads
    assert torch.equal(op(gate_up)[7], op(gate_up[7:8])[0])
