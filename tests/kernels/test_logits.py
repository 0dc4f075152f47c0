"""Scaled and soft-capped logits.

Covers kernels/logits.py.
"""

import pytest
import torch

from kernels.logits import scaled_logits
from tests.kernels.conftest import Target
from tests.kernels.tolerances import assert_close

# The interpreter computes with numpy, which warns where a GPU silently gives the infinity that is meant.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

SHAPES = [(1, 1), (3, 2049), (0, 64)]
LARGE = [(64, 256_000)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("scale", "softcap"), [(0.0625, 0.0), (1.0, 30.0), (2.0, 5.0)])
def test_scaled_logits(target: Target, scale: float, softcap: float, dtype: torch.dtype):
    for num_rows, vocab_size in SHAPES + LARGE * target.large:
        wide = (20 * torch.randn(num_rows, vocab_size + 3)).to(dtype)
        x = wide[:, :vocab_size]
        exact = x.double() * scale
        if softcap:
            exact = softcap * torch.tanh(exact / softcap)
        out = torch.empty(num_rows, vocab_size, device=target.device)
        found = scaled_logits(wide.to(target.device)[:, :vocab_size], scale, softcap, out)
        assert found is out
        largest = max(softcap, exact.abs().max().item() if exact.numel() else 1.0)
        assert_close(out, exact, torch.float32, scale=largest)


def test_in_place(target: Target):
    x = target.to(torch.tensor([[1.0, -1e4, 1e4]]))[0]
    assert scaled_logits(x, 1.0, 30.0, x) is x
    torch.testing.assert_close(x.cpu(), torch.tensor([[30 * torch.tanh(torch.tensor(1 / 30)), -30.0, 30.0]]))
