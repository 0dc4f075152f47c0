"""Chooses between a Triton kernel, a compiled CPU kernel and their torch twin.

Every kernel file takes `triton` and `tl` from here. Where triton is not installed or there is no GPU they are
placeholders with which the files import.
"""

import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from importlib import import_module
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from kernels.cpu.compiler import is_available

P = ParamSpec("P")
R = TypeVar("R")
COMPILED = (torch.float32, torch.int64)  # the dtypes of the first argument of a compiled kernel
Backend = Literal["triton", "cpu", "torch"]

# Multiply-adds are fused, as in every release so far; from 3.9 on Triton warns if this is not set.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


class _Triton:
    """Lets `@triton.jit` decorate a kernel that nothing will launch."""

    @staticmethod
    def jit(fn: Any = None, **_: Any) -> Any:
        return fn if fn is not None else (lambda inner: inner)


class _Language:
    """Lets `tl.constexpr` appear in a kernel's signature and around a constant."""

    @staticmethod
    def constexpr(value: Any) -> Any:
        return value


triton: Any
tl: Any
triton, tl, HAS_TRITON = _Triton(), _Language(), False
# Its import takes 66 MB and 0.13 s. Without a GPU it is of use to the interpreter, and to tests that compile.
if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1" or "triton" in sys.modules:
    with suppress(ImportError):
        triton, tl, HAS_TRITON = import_module("triton"), import_module("triton.language"), True

__all__ = ["HAS_TRITON", "dispatch", "forced", "tl", "triton"]

_forced: Backend | None = None


@contextmanager
def forced(backend: Backend) -> Iterator[None]:
    """Use `backend` for every op called inside, on any device. For tests."""
    global _forced
    before, _forced = _forced, backend
    try:
        yield
    finally:
        _forced = before


def dispatch(
    op_triton: Callable[P, R],
    op_torch: Callable[P, R],
    op_cpu: Callable[P, R] | None = None,
    dtypes: Collection[torch.dtype] = COMPILED,
) -> Callable[P, R]:
    """Return the op, which runs by its first argument, a tensor.

    On CUDA it is Triton, if that is installed. On a CPU it is the compiled kernel, if there is one and numba
    is installed, for the `dtypes` it is for. Else it is the twin, which defines what the others compute.
    """
    compiled = op_cpu if is_available() else None

    @wraps(op_torch)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, torch.Tensor), "the first argument of an op is a tensor"
        if _forced == "triton" or (_forced is None and first.is_cuda and HAS_TRITON):
            return op_triton(*args, **kwargs)
        if compiled is not None and _forced != "torch" and first.dtype in dtypes and first.is_cpu:
            return compiled(*args, **kwargs)
        return op_torch(*args, **kwargs)

    op.__name__ = op.__qualname__ = op_torch.__name__.removesuffix("_torch")
    return op
