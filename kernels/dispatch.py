"""Chooses between a Triton kernel and its torch twin.

Every kernel file takes `triton` and `tl` from here. Where triton is not installed they are placeholders
with which the files import; the twins then run on every device.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
Backend = Literal["triton", "torch"]

# Multiply-adds are fused, as in every release so far; from 3.9 on Triton warns if this is not set.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:

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

    triton, tl, HAS_TRITON = _Triton(), _Language(), False

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


def dispatch(op_triton: Callable[P, R], op_torch: Callable[P, R]) -> Callable[P, R]:
    """Return the op: Triton if its first argument is a CUDA tensor and triton is installed, else the twin."""

    @wraps(op_torch)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, torch.Tensor), "the first argument of an op is a tensor"
        use_triton = HAS_TRITON and first.is_cuda if _forced is None else _forced == "triton"
        return op_triton(*args, **kwargs) if use_triton else op_torch(*args, **kwargs)

    op.__name__ = op.__qualname__ = op_torch.__name__.removesuffix("_torch")
    return op
