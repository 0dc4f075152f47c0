"""Every op is tested as its torch twin, compiled for the CPU, in Triton's interpreter, and on a GPU.

Only test files that name a module of kernels/cpu in their docstring run compiled kernels.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from kernels.cpu.compiler import is_available
from kernels.dispatch import HAS_TRITON, Backend, forced


@dataclass(frozen=True)
class Target:
    """Where an op runs: which implementation, on which device, and whether real sizes are affordable."""

    backend: Backend
    device: torch.device
    large: bool

    def to(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t.to(self.device) for t in tensors)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drop the tests of compiled kernels where there are none: the twins would run twice."""
    items[:] = [item for item in items if not _lacks_compiled_kernels(item)]


def _lacks_compiled_kernels(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return False
    is_compiled = item.callspec.params.get("target") == "compiled"
    return is_compiled and "kernels/cpu/" not in (item.module.__doc__ or "")


@pytest.fixture(params=["torch", "compiled", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    if request.param == "interpreter" and not (HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"):
        pytest.skip("needs triton and TRITON_INTERPRET=1")
    if request.param == "cuda" and not (torch.cuda.is_available() and HAS_TRITON):
        pytest.skip("needs a CUDA device and triton")
    if request.param == "compiled" and not is_available():
        pytest.skip("needs numba and libgomp")
    backends: dict[str, Backend] = {"torch": "torch", "compiled": "cpu"}
    backend = backends.get(request.param, "triton")
    device = torch.device("cuda" if request.param == "cuda" else "cpu")
    with forced(backend):
        yield Target(backend, device, large=request.param == "cuda")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
