"""Covers models/formats/fp16.py."""

import pytest
import torch

from models.errors import ModelError
from models.formats import conversion_to
from models.formats.base import WHOLE, LinearShape

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="needs FBGEMM"
)


def half_linear(shape: LinearShape, dtype: torch.dtype = torch.float32):
    return conversion_to("fp16")(dtype, CPU, WHOLE)("layers.0.mlp.gate_up", shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_those_of_rounded_weights_whatever_rows_are_beside(dtype):
    torch.manual_seed(0)
    weights = half_linear(LinearShape(33, {"gate": 17, "up": 10}, bias=True), dtype)
    gate, up, bias = torch.randn(17, 33), torch.randn(10, 33), torch.randn(27)
    for name, tensor in {
        "gate.bias": bias[:17],
        "up.weight": up,
        "gate.weight": gate,
        "up.bias": bias[17:],
    }.items():
        weights.fill(name, tensor)
    x = torch.randn(9, 33).to(dtype)
    found = weights.matmul(x)
    exact = x.double() @ torch.cat((gate, up)).half().double().t() + bias.to(dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), exact, rtol=3 * torch.finfo(dtype).eps, atol=1e-5 if dtype == torch.float32 else 2e-2
    )
    assert torch.equal(found[4:5], weights.matmul(x[4:5]))


@pytest.mark.parametrize("weight", [65536, -1e30, torch.inf])
def test_weights_that_float16_does_not_have_are_refused(weight):
    gate = torch.zeros(3, 8)
    gate[1, 2] = weight
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.gate_up has weights beyond 65,504"):
        half_linear(LinearShape(8, {"gate": 3})).fill("gate.weight", gate)


def test_gpus_and_cpus_without_the_library_are_refused(monkeypatch):
    with pytest.raises(ModelError, match=r"'fp16' is for CPUs; on a GPU use --dtype float16"):
        conversion_to("fp16")(torch.float32, torch.device("cuda"), WHOLE)
    monkeypatch.setattr("models.formats.fp16._engines", lambda: ["qnnpack"])
    with pytest.raises(ModelError, match="needs an x86 CPU with AVX2"):
        conversion_to("fp16")(torch.float32, CPU, WHOLE)
