"""Products of float32 matrices, and transposed keys, for attention on a CPU: in LLVM's vector instructions.

numba's loops of dot products take up to four times as long: each is a sum in every lane of a vector, added up
at its end. Here the lanes are keys, or elements of a value, and the other factor is one number.
"""

from typing import Any

from kernels.cpu.compiler import HAS_NUMBA, compiled
from kernels.cpu.dot_products import num_lanes
from kernels.cpu.kv_heads import BFLOAT16, FLOAT32, INT8

if HAS_NUMBA:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic
else:

    def intrinsic(function: Any) -> Any:
        return function


SPLIT = 64  # keys whose scores are computed at a time; rows of transposed keys have as many floats
# Floats of a vector, and vectors of a wide tile: its sums and factors fill the registers.
LANES, _VECTORS = (16, 4) if num_lanes() == 32 else (8, 2)
_ROWS, _WIDE, _NARROW = 4, _VECTORS * LANES, _VECTORS // 2 * LANES
_PER_WORD = {FLOAT32: 1, BFLOAT16: 2, INT8: 4}  # elements in 32 bits
WORD_BYTES = 4 * LANES  # of a head that are transposed at a time


def padded(num_columns: int) -> int:
    """Return how many columns b and c of `multiply` have, of which it fills the first `num_columns`."""
    return -(-num_columns // _NARROW) * _NARROW


@intrinsic
def _multiply_tile(
    typingctx: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, rows: Any,
    depth: Any, is_wide: Any, factors: Any,
) -> Any:  # fmt: skip
    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *matrices, rows, depth, is_wide, factors = arguments
        for num_rows in range(1, _ROWS + 1):
            with (
                builder.if_then(builder.icmp_signed("==", rows, rows.type(num_rows))),
                builder.if_else(is_wide) as branches,
            ):
                for branch, num_columns in zip(branches, (_WIDE, _NARROW), strict=True):
                    with branch:
                        _build_product(builder, num_rows, num_columns, tuple(matrices), depth, factors)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8, types.boolean, types.int64), build


def _build_product(
    builder: Any, num_rows: int, num_columns: int, matrices: tuple[Any, ...], depth: Any, factors: Any
) -> None:
    """Build the product of a tile. matrices: a, b and c, each an address and a stride."""
    a, a_stride, b, b_stride, c, c_stride = matrices
    int64, single = ir.IntType(64), ir.FloatType()
    vector = ir.VectorType(single, LANES)
    kind = ir.FunctionType(vector, [vector] * 3)
    add_product = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")

    def pointer(base: Any, stride: Any, row: Any, column: Any, kind: Any) -> Any:
        element = builder.add(builder.mul(row, stride), column)
        address = builder.add(base, builder.mul(element, int64(4)))
        return builder.inttoptr(address, kind.as_pointer())

    before, loop = builder.block, builder.append_basic_block("product.loop")
    end = builder.append_basic_block("product.end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(int64)
    index.add_incoming(int64(0), before)
    columns = range(0, num_columns, LANES)
    totals = {(row, column): builder.phi(vector) for row in range(num_rows) for column in columns}
    elements = {
        column: builder.load(pointer(b, b_stride, index, int64(column), vector), align=4)
        for column in columns
    }
    added = {}
    for row in range(num_rows):
        number = builder.load(pointer(a, a_stride, int64(row), index, single))
        repeated = _repeated(builder, number)
        for column in columns:
            operands = [repeated, elements[column], totals[row, column]]
            added[row, column] = builder.call(add_product, operands)
    following = builder.add(index, int64(1))
    index.add_incoming(following, loop)
    for place, total in totals.items():
        total.add_incoming(vector([0.0] * LANES), before)
        total.add_incoming(added[place], loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, end)

    builder.position_at_end(end)

    def target(row: int, column: int) -> Any:
        return pointer(c, c_stride, int64(row), int64(column), vector)

    def factor(row: int, number: int) -> Any:
        address = pointer(factors, int64(2), int64(row), int64(number), single)
        return _repeated(builder, builder.load(address))

    with builder.if_else(builder.icmp_signed("!=", factors, int64(0))) as (has_factors, has_none):
        with has_factors:
            for row in range(num_rows):
                first, second = factor(row, 0), factor(row, 1)
                for column in columns:
                    seen = builder.fmul(builder.load(target(row, column), align=4), first)
                    product = builder.fmul(added[row, column], second)
                    builder.store(builder.fadd(seen, product), target(row, column), align=4)
        with has_none:
            for place, total in added.items():
                builder.store(total, target(*place), align=4)


@compiled(exact=True)
def multiply(a_ptr, a_stride, b_ptr, b_stride, c_ptr, c_stride, rows, depth, columns, factors_ptr):
    """Write the product of a [rows, depth] and b [depth, columns] to c; depth >= 1.

    With the address of factors, float32 [rows, 2], other than 0, a row of c becomes its first factor times
    what it was, plus the second times the product.

    Strides are in elements. b and c have `padded(columns)` columns. Every element of c is a sum in the order
    of b's rows: it does not depend on the other rows of a, bit for bit.
    """
    for column in range(0, columns, _WIDE):
        for row in range(0, rows, _ROWS):
            _multiply_tile(
                a_ptr + 4 * row * a_stride, a_stride, b_ptr + 4 * column, b_stride,
                c_ptr + 4 * (row * c_stride + column), c_stride,
                min(rows - row, _ROWS), depth, columns - column > _NARROW,
                factors_ptr + 8 * row if factors_ptr else 0,
            )  # fmt: skip


@intrinsic
def transpose_words(
    typingctx: Any, stored: Any, slot_bytes: Any, slots: Any, scales: Any, out: Any, kind: Any
) -> Any:
    """Read LANES words of 32 bits at stored + slot_bytes * slot in each of LANES slots, int64.

    Their elements of a kind are written to `out`, float32 [elements, LANES] in rows of SPLIT, those of INT8
    times scales, float32 [LANES].
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *addresses, scales, out, kind = arguments
        rows = _transposed(builder, *addresses)
        for number in _PER_WORD:
            with builder.if_then(builder.icmp_signed("==", kind, kind.type(number))):
                _write_elements(builder, number, rows, scales, out)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), build


def _transposed(builder: Any, stored: Any, slot_bytes: Any, slots: Any) -> list[Any]:
    int64, words = ir.IntType(64), ir.VectorType(ir.IntType(32), LANES)
    rows = []
    for lane in range(LANES):
        slot = builder.load(builder.gep(builder.inttoptr(slots, int64.as_pointer()), [int64(lane)]))
        address = builder.add(stored, builder.mul(slot, slot_bytes))
        rows.append(builder.load(builder.inttoptr(address, words.as_pointer()), align=1))
    # Of 2 x 2 blocks the two that lie off the diagonal change places; then those inside each block.
    size = LANES // 2
    while size:
        upper = [LANES + lane - size if lane & size else lane for lane in range(LANES)]
        lower = [LANES + lane if lane & size else lane + size for lane in range(LANES)]
        for row in range(LANES):
            if not row & size:
                pair = rows[row], rows[row + size]
                rows[row] = builder.shuffle_vector(*pair, words(upper))
                rows[row + size] = builder.shuffle_vector(*pair, words(lower))
        size //= 2
    return rows


def _write_elements(builder: Any, kind: int, rows: list[Any], scales: Any, out: Any) -> None:
    int64, words = ir.IntType(64), ir.VectorType(ir.IntType(32), LANES)
    vector = ir.VectorType(ir.FloatType(), LANES)
    per_word = _PER_WORD[kind]
    bits = 32 // per_word
    for element in range(per_word * LANES):
        row, part = rows[element // per_word], element % per_word
        highest = builder.shl(row, words([32 - bits * (part + 1)] * LANES))  # the element's bits
        if kind == INT8:
            number = builder.sitofp(builder.ashr(highest, words([32 - bits] * LANES)), vector)
            factors = builder.load(builder.inttoptr(scales, vector.as_pointer()), align=4)
            value = builder.fmul(number, factors)
        else:
            mask = words([(0xFFFFFFFF << (32 - bits)) & 0xFFFFFFFF] * LANES)
            value = builder.bitcast(builder.and_(highest, mask), vector)
        address = builder.add(out, int64(4 * SPLIT * element))
        builder.store(value, builder.inttoptr(address, vector.as_pointer()), align=4)


@intrinsic
def widen(typingctx: Any, stored: Any, scale: Any, out: Any, kind: Any) -> Any:
    """Write LANES elements of a kind at `stored` to `out` as float32, those of INT8 times scale."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        stored, scale, out, kind = arguments
        words, vector = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.FloatType(), LANES)
        for number, per_word in _PER_WORD.items():
            with builder.if_then(builder.icmp_signed("==", kind, kind.type(number))):
                narrow = ir.VectorType(ir.IntType(32 // per_word), LANES)
                elements = builder.load(builder.inttoptr(stored, narrow.as_pointer()), align=1)
                if number == INT8:
                    value = builder.sitofp(elements, vector)
                    value = builder.fmul(value, _repeated(builder, scale))
                elif number == BFLOAT16:
                    value = builder.shl(builder.zext(elements, words), words([16] * LANES))
                    value = builder.bitcast(value, vector)
                else:
                    value = builder.bitcast(elements, vector)
                builder.store(value, builder.inttoptr(out, vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64), build


def _repeated(builder: Any, number: Any) -> Any:
    """Return a vector with a float in all lanes."""
    vector, lanes = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)
    first = builder.insert_element(vector(ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(first, vector(ir.Undefined), lanes([0] * LANES))
