"""Compiles the CPU kernels with numba, where it is installed and NUMBA_DISABLE_JIT is not set.

A kernel takes addresses, sizes and strides, as a Triton kernel does: passing an address costs 0.1 µs and an
array 0.5 µs, and a decode step of a small model makes 300 calls.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

try:
    import numba
except ImportError:
    HAS_NUMBA = False
else:
    HAS_NUMBA = not numba.config.DISABLE_JIT

if HAS_NUMBA:
    import llvmlite.binding
    from llvmlite import ir
    from numba.core import cgutils
    from numba.core.ccallback import CFunc
    from numba.core.registry import cpu_target
    from numba.extending import intrinsic

    from kernels.cpu.code_cache import has_room, kept

    get_num_threads, prange = numba.get_num_threads, numba.prange
else:
    get_num_threads, prange = lambda: 1, range

# Sums may be reordered and multiply-adds fused; infinities and NaN keep their meaning.
_FAST_MATH = {"arcp", "contract", "nsz", "reassoc"}


def compiled(
    *, parallel: bool = False, exact: bool = False, inline: bool = False
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles a function when it is called; without numba it leaves it as it is.

    Loops over `prange` of a parallel one are shared out by `kernels.cpu.team`, a few parts for each
    thread. They release the GIL, and other code keeps it: after some microseconds, taking it again may cost
    more. Such a loop must not reduce over its index. In an exact function operations on floats keep their
    order. An inline one is compiled as a part of its callers alone.
    """
    if not HAS_NUMBA:
        return lambda function: function
    options = {
        "parallel": parallel,
        "fastmath": False if exact else _FAST_MATH,
        "error_model": "numpy",
        "inline": "always" if inline else "never",
    }

    return lambda function: kept(numba.njit(**options)(function))


@cache
def c_function(function: Callable[..., None], num_ints: int, num_floats: int) -> Any:
    """Compile a function of int64 and then float64 for `call`, which takes its `address`; blocks.

    A loop over `prange` that calls a function itself contains its code, and is compiled with it, twice.
    """
    signature = (numba.int64,) * num_ints + (numba.float64,) * num_floats, numba.void
    compiled = kept(CFunc(function, signature, {}, {"fastmath": _FAST_MATH, "error_model": "numpy"}))
    compiled.compile()
    return compiled


@cache
def is_available() -> bool:
    """Return True if the kernels can run here."""
    return HAS_NUMBA


def can_keep() -> bool:
    """Return True if kernels are compiled here, and their code can be kept on disk."""
    return HAS_NUMBA and has_room()


def assembly(module: str) -> str:
    """Return the instructions that numba's compiler makes of a module, LLVM's IR.

    They show what it compiles for: NUMBA_CPU_NAME and NUMBA_CPU_FEATURES may name another CPU than this.
    """
    machine = cpu_target.target_context.codegen()._tm
    return str(machine.emit_assembly(llvmlite.binding.parse_assembly(module)))


def set_num_threads(num_threads: int) -> None:
    """Set the number of threads of parallel kernels that this thread calls, at most one for each core."""
    if is_available():
        num_threads = min(num_threads, numba.config.NUMBA_NUM_THREADS)
        numba.set_num_threads(num_threads)
        _team().grow(num_threads)


@cache
def _team() -> Any:
    return import_module("kernels.cpu.team").Team()


call: Any = None
if HAS_NUMBA:

    @intrinsic
    def call(typingctx: Any, address: Any, arguments: Any) -> Any:
        """Call the function at an address with the numbers of a tuple."""

        def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            numbers = cgutils.unpack_tuple(builder, values[1])
            kind = ir.FunctionType(ir.VoidType(), [number.type for number in numbers])
            builder.call(builder.inttoptr(values[0], kind.as_pointer()), numbers)
            return context.get_dummy_value()

        return numba.types.void(numba.types.int64, arguments), build

    @intrinsic
    def _pointer(typingctx: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], cgutils.voidptr_t)

        return numba.types.voidptr(address), build


@compiled()
def floats(address: int, rows: int, columns: int) -> Any:
    """Return float32 [rows, columns] at an address; `columns` is the stride of a row."""
    return numba.carray(_pointer(address), (rows, columns), np.float32)


@compiled()
def int8s(address: int, rows: int, columns: int) -> Any:
    """Return int8 [rows, columns] at an address."""
    return numba.carray(_pointer(address), (rows, columns), np.int8)


@compiled()
def int16s(address: int, rows: int, columns: int) -> Any:
    """Return int16 [rows, columns] at an address."""
    return numba.carray(_pointer(address), (rows, columns), np.int16)


@compiled()
def int32s(address: int, rows: int, columns: int) -> Any:
    """Return int32 [rows, columns] at an address."""
    return numba.carray(_pointer(address), (rows, columns), np.int32)


@compiled()
def int64s(address: int, rows: int, columns: int) -> Any:
    """Return int64 [rows, columns] at an address."""
    return numba.carray(_pointer(address), (rows, columns), np.int64)
