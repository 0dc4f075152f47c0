"""Heads of keys and values on a CPU: reads and writes what kernels/kv_values.py describes."""

from typing import Any

import numpy as np
import torch

from kernels.cpu.compiler import HAS_NUMBA, assembly, compiled, floats, int8s, int16s

if HAS_NUMBA:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic
else:

    def intrinsic(function: Any) -> Any:
        return function


FLOAT32, BFLOAT16, INT8, OTHER = range(4)
# What the kernels read and write; the others are left to the twins.
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.int8: INT8}
ITEM_BYTES = (4, 2, 1)  # of each kind

_LINE = 64  # bytes of a cache line
_SIXTEEN, _ROUNDING, _ONE = np.uint32(16), np.uint32(0x7FFF), np.uint32(1)
_LARGEST, _STEP, _HALF = np.float32(127.0), np.float32(1.0 / 127.0), np.float32(0.5)


@compiled()
def _from_bfloat16(bits):
    """Return the bfloat16 with the bits of an int16 as a float32."""
    return np.uint32(np.uint32(bits) << _SIXTEEN).view(np.float32)


@compiled()
def _to_bfloat16(x):
    """Return the bits of the bfloat16 nearest to a float32, of two the even one."""
    bits = np.float32(x).view(np.uint32)
    return np.int16(np.uint32(bits + _ROUNDING + ((bits >> _SIXTEEN) & _ONE)) >> _SIXTEEN)


@intrinsic
def _extend(typingctx: Any, bits: Any) -> Any:
    """Return the float16 with the bits of an int16 as a float32."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), build


@intrinsic
def _truncate(typingctx: Any, x: Any) -> Any:
    """Return the bits of the float16 nearest to a float32, of two the even one."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), build


@compiled(exact=True)
def extend_by_integers(bits):
    """Return what `_extend` does, where the CPU has no instruction for it."""
    bits = np.uint32(np.uint16(bits))
    magnitude = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13))
    if bits & np.uint32(0x7C00) == np.uint32(0x7C00):  # infinite or NaN
        magnitude |= np.uint32(0x7F800000)
    else:  # the exponents of the two differ by 112
        magnitude = np.float32(magnitude.view(np.float32) * np.float32(2.0**112)).view(np.uint32)
    return np.uint32(magnitude | ((bits & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)


@compiled(exact=True)
def truncate_by_integers(x):
    """Return what `_truncate` does, where the CPU has no instruction for it."""
    bits = np.float32(x).view(np.uint32)
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if magnitude > np.uint32(0x7F800000):
        half = np.uint32(0x7E00)  # NaN
    elif magnitude >= np.uint32(0x47800000):
        half = np.uint32(0x7C00)  # infinite: 2**16 and more
    elif magnitude < np.uint32(0x38800000):  # less than 2**-14: the sum with 0.5 rounds at 2**-24
        half = np.uint32(
            np.float32(magnitude.view(np.float32) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000)
        )
    else:
        odd = (magnitude >> np.uint32(13)) & np.uint32(1)
        half = np.uint32((magnitude + np.uint32(0xFFF) + odd - np.uint32(112 << 23)) >> np.uint32(13))
    return np.int16(half | ((bits >> np.uint32(16)) & np.uint32(0x8000)))


# Without an instruction LLVM calls this function of the C compiler's library, is not given it, and aborts.
_HAS_FLOAT16 = HAS_NUMBA and "__extendhfsf2" not in assembly("""
define float @extend(half %x) {
  %y = fpext half %x to float
  ret float %y
}
""")
_from_float16 = _extend if _HAS_FLOAT16 else extend_by_integers
_to_float16 = _truncate if _HAS_FLOAT16 else truncate_by_integers


@intrinsic
def _prefetch(typingctx: Any, address: Any) -> Any:
    """Begin to load the cache line of an address."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t] + [ir.IntType(32)] * 3)
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [line, *(ir.IntType(32)(number) for number in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.int64), build


@compiled()
def prefetch(address, num_bytes):
    """Begin to load memory into the caches."""
    for i in range(0, num_bytes, _LINE):
        _prefetch(address + i)


@compiled()
def read_scale(scales_ptr, num_scales, head):
    """Return the scale of a head of int8, of its num_scales the first."""
    return _from_float16(int16s(scales_ptr, head + 1, num_scales)[head, 0])


@compiled()
def read_element(stored_ptr, scale, index, kind):
    """Return an element as a float32; of INT8, times scale."""
    if kind == FLOAT32:
        return floats(stored_ptr, 1, index + 1)[0, index]
    if kind == BFLOAT16:
        return _from_bfloat16(int16s(stored_ptr, 1, index + 1)[0, index])
    return np.float32(int8s(stored_ptr, 1, index + 1)[0, index]) * scale


@compiled()
def write_head(x_ptr, stored_ptr, scales_ptr, num_scales, kind, head, head_dim):
    """Store float32 [head_dim] at x_ptr as the keys or values of a head; of a kind OTHER, do nothing."""
    x, first = floats(x_ptr, 1, head_dim)[0], head * head_dim
    if kind == FLOAT32:
        values = floats(stored_ptr + 4 * first, 1, head_dim)[0]
        for i in range(head_dim):
            values[i] = x[i]
    elif kind == BFLOAT16:
        bits = int16s(stored_ptr + 2 * first, 1, head_dim)[0]
        for i in range(head_dim):
            bits[i] = _to_bfloat16(x[i])
    elif kind == INT8:
        largest = np.float32(0.0)
        for i in range(head_dim):
            largest = max(largest, abs(x[i]))
        scale_bits = _to_float16(largest * _STEP)
        int16s(scales_ptr, head + 1, num_scales)[head, 0] = scale_bits
        scale = _from_float16(scale_bits)
        divisor = scale if scale > 0 else np.float32(1.0)
        numbers = int8s(stored_ptr + first, 1, head_dim)[0]
        for i in range(head_dim):
            numbers[i] = np.int8(min(max(np.floor(x[i] / divisor + _HALF), -_LARGEST), _LARGEST))
