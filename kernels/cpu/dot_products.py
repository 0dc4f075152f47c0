"""Dot products of int8 with int16, summed in int32: a tile of them at a time, in vector instructions.

numba's own loops widen both factors to int32, which takes twice as long as `vpmaddwd` (vpdpwssd where there
is VNNI): two products and their sum in each of 16 or 8 lanes. So the loop is given as LLVM's instructions.
"""

from functools import cache
from typing import Any

from kernels.cpu.compiler import HAS_NUMBA

if HAS_NUMBA:
    import llvmlite.binding
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic


@cache
def num_lanes() -> int:
    """Return how many int16 a vector of this CPU has: 32, 16, or 0 if it is neither AVX512 nor AVX2."""
    features = llvmlite.binding.get_host_cpu_features() if HAS_NUMBA else {}
    return 32 if features.get("avx512bw") else 16 if features.get("avx2") else 0


_MULTIPLY_ADD = {32: "llvm.x86.avx512.pmaddw.d.512", 16: "llvm.x86.avx2.pmadd.wd"}


def dot_tile(num_rows: int, num_tokens: int) -> Any:
    """Return a compiled function of (x, x_stride, weight, weight_stride, size, out, out_stride, adds).

    It computes the dot products of `num_rows` rows of weight, int8, with `num_tokens` rows of x, int16, over
    the first `size` elements, a positive multiple of num_lanes(), and writes them to out float32 [num_tokens,
    num_rows], or adds them to it. x, weight and out are addresses, strides are in elements, all int64.
    """
    if not num_lanes():
        return None

    @intrinsic
    def dot(
        typingctx: Any, x: Any, x_stride: Any, weight: Any, weight_stride: Any, size: Any, out: Any,
        out_stride: Any, adds: Any,
    ) -> Any:  # fmt: skip
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _build_loop(builder, num_rows, num_tokens, *arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7, types.boolean), build

    return dot


def _build_loop(
    builder: Any, num_rows: int, num_tokens: int, x: Any, x_stride: Any, weight: Any, weight_stride: Any,
    size: Any, out: Any, out_stride: Any, adds: Any,
) -> None:  # fmt: skip
    lanes = num_lanes()
    int64, int32 = ir.IntType(64), ir.IntType(32)
    narrow, wide = ir.VectorType(ir.IntType(8), lanes), ir.VectorType(ir.IntType(16), lanes)
    sum_type = ir.VectorType(int32, lanes // 2)
    multiply_add = _intrinsic(builder, _MULTIPLY_ADD[lanes], sum_type, wide, wide)
    add_lanes = _intrinsic(builder, f"llvm.vector.reduce.add.v{lanes // 2}i32", int32, sum_type)

    before, loop = builder.block, builder.append_basic_block("dot.loop")
    end = builder.append_basic_block("dot.end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(int64)
    index.add_incoming(int64(0), before)
    tile = [(row, token) for token in range(num_tokens) for row in range(num_rows)]
    totals = {place: builder.phi(sum_type) for place in tile}

    def load(base: Any, stride: Any, number: int, vector: Any, itemsize: int) -> Any:
        element = builder.add(builder.mul(int64(number), stride), index)
        address = builder.add(base, builder.mul(element, int64(itemsize)))
        return builder.load(builder.inttoptr(address, vector.as_pointer()), align=1)

    tokens = [load(x, x_stride, token, wide, 2) for token in range(num_tokens)]
    added = {}
    for row in range(num_rows):
        values = builder.sext(load(weight, weight_stride, row, narrow, 1), wide)
        for token in range(num_tokens):
            products = builder.call(multiply_add, [tokens[token], values])
            added[row, token] = builder.add(totals[row, token], products)
    following = builder.add(index, int64(lanes))
    index.add_incoming(following, loop)
    for place in tile:
        totals[place].add_incoming(sum_type([0] * (lanes // 2)), before)
        totals[place].add_incoming(added[place], loop)
    builder.cbranch(builder.icmp_signed("<", following, size), loop, end)

    builder.position_at_end(end)
    target = builder.inttoptr(out, ir.FloatType().as_pointer())
    for row, token in tile:
        place = builder.add(builder.mul(int64(token), out_stride), int64(row))
        element = builder.gep(target, [place])
        total = builder.sitofp(builder.call(add_lanes, [added[row, token]]), ir.FloatType())
        total = builder.select(adds, builder.fadd(builder.load(element), total), total)
        builder.store(total, element)


def _intrinsic(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)
