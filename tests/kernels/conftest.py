"""Every op is tested as its torch twin, as its Triton kernel in the interpreter, and on a GPU."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from kernels.dispatch import HAS_TRITON, Backend, forced


@dataclass(frozen=True)
class Target:
    """Where an op runs: which implementation, on which device, and whether real sizes are affordable."""

    backend: Backend
    device: torch.device
    large: bool

    def to(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t.to(self.device) for t in tensors)


@pytest.fixture(params=["torch", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    if request.param == "interpreter" and not (HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"):
        pytest.skip("needs triton and TRITON_INTERPRET=1")
    if request.param == "cuda" and not (torch.cuda.is_available() and HAS_TRITON):
        pytest.skip("needs a CUDA device and triton")
    backend: Backend = "torch" if request.param == "torch" else "triton"
    device = torch.device("cuda" if request.param == "cuda" else "cpu")
    with forced(backend):
        yield Target(backend, device, large=request.param == "cuda")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
