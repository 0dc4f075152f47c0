"""Lets a thread use CPU kernels only if their code is on disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_may_compile = ContextVar("may_compile", default=True)


class NotKept(Exception):
    """The code of a kernel is not on disk, and may not be compiled here."""


@contextmanager
def without_compiling() -> Iterator[None]:
    """Let kernels whose code is not on disk raise NotKept in place of being compiled, on this thread."""
    token = _may_compile.set(False)
    try:
        yield
    finally:
        _may_compile.reset(token)


def check_may_compile(kernel: str) -> None:
    """Raise NotKept inside of `without_compiling`."""
    if not _may_compile.get():
        raise NotKept(kernel)
