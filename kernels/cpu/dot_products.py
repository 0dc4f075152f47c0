"""Dot products of int8 with int16, summed in int32 and scaled: a tile at a time, in vector instructions.

numba's own loops widen both factors to int32, which takes twice as long as `vpmaddwd` (vpdpwssd where there
is VNNI): two products and their sum in each of 16 or 8 lanes. So the tile is given as LLVM's instructions.
"""

import re
from functools import cache
from typing import Any, NamedTuple

from kernels.cpu.compiler import HAS_NUMBA, assembly

if HAS_NUMBA:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic


_ADDITION = """
define void @add(ptr %x, ptr %y) {
  %left = load <32 x i16>, ptr %x
  %right = load <32 x i16>, ptr %y
  %sum = add <32 x i16> %left, %right
  store <32 x i16> %sum, ptr %x
  ret void
}
"""


@cache
def num_lanes() -> int:
    """Return how many int16 are added at once by what numba compiles: 32 (AVX512), 16 (AVX2), else 0."""
    if not HAS_NUMBA:
        return 0
    registers = set(re.findall("vpaddw.*([yz]mm)", assembly(_ADDITION)))
    return 32 if "zmm" in registers else 16 if "ymm" in registers else 0


_MULTIPLY_ADD = {32: "llvm.x86.avx512.pmaddw.d.512", 16: "llvm.x86.avx2.pmadd.wd"}


_LONGEST = 2048  # products of at most 8191 * 128 whose sum fits into int32
_AHEAD = (
    4608  # bytes of the weight between what is multiplied and what is fetched, the fastest of 2 to 16 KiB
)


class _Arguments(NamedTuple):
    """Of a tile; addresses, strides and sizes are int64."""

    x: Any  # int16 [num_tokens, size], from -8191 to 8191
    weight: Any  # int8 [num_rows, size]
    stride: Any  # elements from one row of x or of the weight to the next
    size: Any  # a positive multiple of num_lanes()
    out: Any  # float32 [num_tokens, num_rows]
    out_stride: Any
    token_scales: Any  # float32 [num_tokens]
    row_scales: Any  # float32 [num_rows]
    has_bias: Any  # boolean
    bias: Any  # float32 [num_rows]; without a bias any address of that many


def dot_tile(num_rows: int, num_tokens: int) -> Any:
    """Return a compiled function of `_Arguments` that computes a tile of dot products; None without vectors.

    They are those of `num_rows` rows of the weight, 1 or 4, with `num_tokens` rows of x, times the scales of
    both. Sums of 2,048 products are exact, and are themselves summed in float32. What follows the rows in
    memory is fetched into the cache meanwhile; left to the CPU or done at once, memory and arithmetic take
    turns.
    """
    if not num_lanes():
        return None

    @intrinsic
    def dot(
        typingctx: Any, x: Any, weight: Any, stride: Any, size: Any, out: Any, out_stride: Any,
        token_scales: Any, row_scales: Any, has_bias: Any, bias: Any,
    ) -> Any:  # fmt: skip
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            tile = _Arguments(*arguments)
            _build_results(builder, num_rows, _build_loops(builder, num_rows, num_tokens, tile), tile)
            return context.get_dummy_value()

        kinds = (types.boolean if name == "has_bias" else types.int64 for name in _Arguments._fields)
        return types.void(*kinds), build

    return dot


def _build_loops(builder: Any, num_rows: int, num_tokens: int, tile: _Arguments) -> list[Any]:
    """Build the loops over elements; returns a vector of float32 [num_rows] for each token."""
    lanes = num_lanes()
    int64 = ir.IntType(64)
    narrow, wide = ir.VectorType(ir.IntType(8), lanes), ir.VectorType(ir.IntType(16), lanes)
    sum_type = ir.VectorType(ir.IntType(32), lanes // 2)
    result_type = ir.VectorType(ir.FloatType(), num_rows)
    multiply_add = _intrinsic(builder, _MULTIPLY_ADD[lanes], sum_type, wide, wide)
    before, outer, inner, after, end = (
        builder.block,
        *(builder.append_basic_block(f"dot.{name}") for name in ("outer", "inner", "after", "end")),
    )
    builder.branch(outer)

    builder.position_at_end(outer)
    start = builder.phi(int64)
    results = [builder.phi(result_type) for _ in range(num_tokens)]
    stop = builder.add(start, int64(_LONGEST))
    stop = builder.select(builder.icmp_signed("<", stop, tile.size), stop, tile.size)
    builder.branch(inner)

    builder.position_at_end(inner)
    index = builder.phi(int64)
    totals = [[builder.phi(sum_type) for _ in range(num_rows)] for _ in range(num_tokens)]

    def load(base: Any, number: int, vector: Any, itemsize: int) -> Any:
        element = builder.add(builder.mul(int64(number), tile.stride), index)
        address = builder.add(base, builder.mul(element, int64(itemsize)))
        return builder.load(builder.inttoptr(address, vector.as_pointer()), align=1)

    fetched = builder.add(tile.weight, builder.mul(index, int64(num_rows)))
    for far in range(0, lanes * num_rows, 64):
        _build_prefetch(builder, builder.add(fetched, int64(_AHEAD + far)))
    tokens = [load(tile.x, token, wide, 2) for token in range(num_tokens)]
    sums: list[list[Any]] = [[] for _ in range(num_tokens)]
    for row in range(num_rows):
        values = builder.sext(load(tile.weight, row, narrow, 1), wide)
        for token in range(num_tokens):
            products = builder.call(multiply_add, [tokens[token], values])
            sums[token].append(builder.add(totals[token][row], products))
    following = builder.add(index, int64(lanes))
    builder.cbranch(builder.icmp_signed("<", following, stop), inner, after)
    _join(index, (outer, start), (inner, following))
    for token in range(num_tokens):
        for row in range(num_rows):
            zeros = sum_type([0] * (lanes // 2))
            _join(totals[token][row], (outer, zeros), (inner, sums[token][row]))

    builder.position_at_end(after)
    added = []
    for token in range(num_tokens):
        part = builder.sitofp(_added_lanes(builder, sums[token]), result_type)
        added.append(builder.fadd(results[token], part))
        _join(results[token], (before, result_type([0.0] * num_rows)), (after, added[token]))
    _join(start, (before, int64(0)), (after, stop))
    builder.cbranch(builder.icmp_signed("<", stop, tile.size), outer, end)

    builder.position_at_end(end)
    return added


def _build_prefetch(builder: Any, address: Any) -> None:
    int32 = ir.IntType(32)
    prefetch = _intrinsic(builder, "llvm.prefetch.p0", ir.VoidType(), cgutils.voidptr_t, int32, int32, int32)
    line = builder.inttoptr(address, cgutils.voidptr_t)
    builder.call(prefetch, [line, *(int32(number) for number in (0, 3, 1))])  # of data that is read and kept


def _build_results(builder: Any, num_rows: int, totals: list[Any], tile: _Arguments) -> None:
    """Scale the totals of each token, add the bias, and write them."""
    int64, vector = ir.IntType(64), ir.VectorType(ir.FloatType(), num_rows)

    def place(base: Any, element: Any, kind: Any) -> Any:
        return builder.inttoptr(builder.add(base, builder.mul(element, int64(4))), kind.as_pointer())

    def read(base: Any, element: int, kind: Any) -> Any:
        return builder.load(place(base, int64(element), kind), align=4)

    row_scales = read(tile.row_scales, 0, vector)
    nothing = vector([-0.0] * num_rows)  # added to 0.0 and to -0.0 it leaves both as they are
    bias = builder.select(tile.has_bias, read(tile.bias, 0, vector), nothing)
    for token, total in enumerate(totals):
        token_scale = _repeated(builder, read(tile.token_scales, token, ir.FloatType()), num_rows)
        scaled = builder.fmul(total, builder.fmul(token_scale, row_scales))
        target = place(tile.out, builder.mul(int64(token), tile.out_stride), vector)
        builder.store(builder.fadd(scaled, bias), target, align=4)


def _added_lanes(builder: Any, vectors: list[Any]) -> Any:
    """Return a vector with the sum of the lanes of each of 1 or 4 vectors.

    Two vectors are interleaved as `vpunpckldq` and `vpunpckhdq` do within 16 bytes and added, which leaves
    half as many vectors with the sums of either side by side; then the halves of the last one are added.
    """
    lanes, width = num_lanes() // 2, 1
    while len(vectors) > 1:
        low = [
            lane + part + source
            for group in range(0, lanes, 4)
            for part in range(0, 2, width)
            for source in (0, lanes)
            for lane in range(group, group + width)
        ]
        high = [lane + 2 for lane in low]
        vectors = [
            builder.add(_shuffled(builder, first, second, low), _shuffled(builder, first, second, high))
            for first, second in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        width *= 2
    total = vectors[0]
    while lanes > width:
        lanes //= 2
        halves = [_shuffled(builder, total, total, list(range(half, half + lanes))) for half in (0, lanes)]
        total = builder.add(*halves)
    return total


def _shuffled(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    mask = ir.VectorType(ir.IntType(32), len(lanes))(lanes)
    return builder.shuffle_vector(first, second, mask)


def _repeated(builder: Any, number: Any, count: int) -> Any:
    """Return a vector of one number."""
    vector = ir.VectorType(number.type, count)
    single = builder.insert_element(vector(ir.Undefined), number, ir.IntType(32)(0))
    return _shuffled(builder, single, single, [0] * count)


def _join(phi: Any, *sources: tuple[Any, Any]) -> None:
    """Give a phi its value for each block that may come before."""
    for block, value in sources:
        phi.add_incoming(value, block)


def _intrinsic(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)
