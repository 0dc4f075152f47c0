"""Threads of the CPU kernels: loops over `numba.prange` are shared out to them.

OpenMP's threads either sleep between two loops, and waking one takes 40 µs on a virtual machine, or they
spin, and then a loop beside a busy process takes ten times as long, since the thread that holds a part has
lost its core to one that spins. Here a thread that waits gives its core away with each look (`sched_yield`),
which takes 2 µs in both cases, and sleeps only when there has been no loop for about a millisecond. Parts are
handed out one at a time, and the caller takes them too: a thread that sleeps or has lost its core delays no
part but the one it holds.

The control block is int64 words, each that several threads write on a cache line of its own. A ticket is
generation, number of parts and the next part in one word, so that one addition claims a part of a loop that
cannot have ended. A second caller at the same time computes its loop alone.
"""

import ctypes
import threading

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic
from numba.np.ufunc.parallel import _launch_threads

from kernels.cpu.code_cache import kept

SYMBOL = "monoloop_team"  # the address of the control block, for code that was compiled in another process
TICKET, DONE, IS_BUSY, SLEEPERS, JOB, MUTEX, CONDITION, NUM_WORDS = 0, 8, 16, 24, 32, 48, 64, 80
_FUNCTION, _ARGS, _DIMENSIONS, _STEPS, _DATA, _NUM_DIMENSIONS, _NUM_ARGS, _START, _STOP = range(JOB, JOB + 9)

_words = np.zeros(NUM_WORDS + 8, np.int64)
_control_address = (_words.ctypes.data + 63) // 64 * 64  # on a cache line's border
llvmlite.binding.add_symbol(SYMBOL, _control_address)  # before anything that reads it is compiled

PARTS_PER_THREAD = 4  # more balance better, and each costs 0.1 µs
LOOKS_BEFORE_SLEEP = 4_000  # of about 0.3 µs on an idle core

_yield = types.ExternalFunction("sched_yield", types.int32())
_lock = types.ExternalFunction("pthread_mutex_lock", types.int32(types.intp))
_unlock = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.intp))
_wait = types.ExternalFunction("pthread_cond_wait", types.int32(types.intp, types.intp))
_wake_all = types.ExternalFunction("pthread_cond_broadcast", types.int32(types.intp))


def _word_op(build):
    """Return an intrinsic on the word at an address; `build(builder, pointer, value)` returns its result."""

    @intrinsic
    def operation(typingctx, address, value):
        def codegen(context, builder, signature, arguments):
            word = ir.IntType(64)
            return build(builder, builder.inttoptr(arguments[0], word.as_pointer()), arguments[1])

        return types.intp(types.intp, types.intp), codegen

    return operation


def _store_word(builder, pointer, value):
    builder.store_atomic(value, pointer, "seq_cst", 8)
    return value


_load = _word_op(lambda builder, pointer, _: builder.load_atomic(pointer, "seq_cst", 8))
_store = _word_op(_store_word)
_add = _word_op(lambda builder, pointer, value: builder.atomic_rmw("add", pointer, value, "seq_cst"))
_swap = _word_op(lambda builder, pointer, value: builder.atomic_rmw("xchg", pointer, value, "seq_cst"))
_get = _word_op(lambda builder, pointer, _: builder.load(pointer))


def _set_word(builder, pointer, value):
    builder.store(value, pointer)
    return value


_set = _word_op(_set_word)


@intrinsic(prefer_literal=True)
def _stack(typingctx, num_words):
    """Return the address of words on the stack; the number is a literal."""
    size = num_words.literal_value

    def codegen(context, builder, signature, arguments):
        return builder.ptrtoint(cgutils.alloca_once(builder, ir.IntType(64), size=size), ir.IntType(64))

    return types.intp(num_words), codegen


@intrinsic
def _call(typingctx, function, args, dimensions, steps, data):
    """Call the function at an address with four pointers."""

    def codegen(context, builder, signature, arguments):
        pointer = cgutils.voidptr_t
        kind = ir.FunctionType(ir.VoidType(), [pointer] * 4)
        address, *values = arguments
        builder.call(
            builder.inttoptr(address, kind.as_pointer()),
            [builder.inttoptr(value, pointer) for value in values],
        )
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), codegen


@intrinsic
def _control(typingctx):
    """Return the address of the control block."""

    def codegen(context, builder, signature, arguments):
        value = context.get_c_value(builder, ir.IntType(64), SYMBOL)
        return builder.ptrtoint(value, ir.IntType(64))

    return types.intp(), codegen


@numba.njit(nogil=True)
def _word(address, index):
    return address + 8 * index


@numba.njit(nogil=True)
def _run_part(job, part, num_parts):
    """Run one part of a loop. `job` is the address of the control block or of a copy of it."""
    start, stop = _get(_word(job, _START), 0), _get(_word(job, _STOP), 0)
    dimensions, args = _get(_word(job, _DIMENSIONS), 0), _get(_word(job, _ARGS), 0)
    steps = _get(_word(job, _STEPS), 0)
    # A loop has an argument and some dimensions for each array and number that its body uses: a dozen or two.
    own_dimensions, own_args, schedule = _stack(64), _stack(256), _stack(2)
    _set(own_dimensions, 1)
    for i in range(1, _get(_word(job, _NUM_DIMENSIONS), 0) + 1):
        _set(_word(own_dimensions, i), _get(_word(dimensions, i), 0))
    for i in range(_get(_word(job, _NUM_ARGS), 0)):
        base = _get(_word(args, i), 0)
        _set(_word(own_args, i), base + part * _get(_word(steps, i), 0) if base else 0)
    if stop > start:
        size = stop - start
        _set(schedule, start + size * part // num_parts)
        _set(_word(schedule, 1), start + size * (part + 1) // num_parts - 1)
        _set(own_args, schedule)
    _call(_get(_word(job, _FUNCTION), 0), own_args, own_dimensions, steps, _get(_word(job, _DATA), 0))


@numba.njit(nogil=True)
def _take_part(control):
    """Run the next part of the current loop; returns False if there is none."""
    ticket = _load(_word(control, TICKET), 0)
    num_parts = (ticket >> 16) & 0xFFFF
    if (ticket & 0xFFFF) >= num_parts:
        return False
    ticket = _add(_word(control, TICKET), 1)
    part, num_parts = ticket & 0xFFFF, (ticket >> 16) & 0xFFFF
    if part >= num_parts:
        return False
    _run_part(control, part, num_parts)
    _add(_word(control, DONE), 1)
    return True


@kept
@numba.njit(nogil=True)
def _serve(control):
    """Take parts of all loops to come."""
    looks = 0
    while True:
        if _take_part(control):
            looks = 0
            continue
        looks += 1
        if looks < LOOKS_BEFORE_SLEEP:
            _yield()
            continue
        _lock(_word(control, MUTEX))
        _add(_word(control, SLEEPERS), 1)
        ticket = _load(_word(control, TICKET), 0)
        if (ticket & 0xFFFF) >= ((ticket >> 16) & 0xFFFF):
            _wait(_word(control, CONDITION), _word(control, MUTEX))
        _add(_word(control, SLEEPERS), -1)
        _unlock(_word(control, MUTEX))
        looks = 0


def _parallel_for(function, args, dimensions, steps, data, num_dimensions, num_args, num_threads):
    """Run a loop: what numba's compiled code calls as `numba_parallel_for`."""
    if _get(dimensions, 0) < 1:
        return
    control, own = _control(), _stack(80)
    is_team = num_threads > 1 and _swap(_word(control, IS_BUSY), 1) == 0
    job = control if is_team else own
    num_parts = _get(dimensions, 0)  # at least 1
    _set(_word(job, _FUNCTION), function)
    _set(_word(job, _ARGS), args)
    _set(_word(job, _DIMENSIONS), dimensions)
    _set(_word(job, _STEPS), steps)
    _set(_word(job, _DATA), data)
    _set(_word(job, _NUM_DIMENSIONS), num_dimensions)
    _set(_word(job, _NUM_ARGS), num_args)
    _set(_word(job, _START), 0)
    _set(_word(job, _STOP), 0)
    if _get(_word(dimensions, 1), 0) == 2:
        # A loop over one index. Its schedule has the first and the last index of each part: share it anew.
        schedule = _get(args, 0)
        start = stop = _get(schedule, 0)
        for part in range(num_parts):
            first, last = _get(_word(schedule, 2 * part), 0), _get(_word(schedule, 2 * part + 1), 0)
            if first <= last:
                stop = max(stop, last + 1)
        _set(_word(job, _START), start)
        _set(_word(job, _STOP), stop)
        num_parts = min(stop - start, PARTS_PER_THREAD * num_threads if is_team else 1)
    if not is_team:
        for part in range(num_parts):
            _run_part(own, part, num_parts)
        return
    _store(_word(control, DONE), 0)
    generation = (_load(_word(control, TICKET), 0) >> 32) + 1
    _store(_word(control, TICKET), ((generation & 0x7FFFFFFF) << 32) | (num_parts << 16))
    if _load(_word(control, SLEEPERS), 0) > 0:
        _lock(_word(control, MUTEX))
        _wake_all(_word(control, CONDITION))
        _unlock(_word(control, MUTEX))
    while _take_part(control):
        pass
    while _load(_word(control, DONE), 0) < num_parts:
        _yield()
    _store(_word(control, IS_BUSY), 0)


class Team:
    """The helper threads. One for a process; threads are added when more are asked for."""

    def __init__(self) -> None:
        self._num_helpers = 0
        libc = ctypes.CDLL(None)
        libc.pthread_mutex_init(ctypes.c_void_p(_control_address + 8 * MUTEX), None)
        libc.pthread_cond_init(ctypes.c_void_p(_control_address + 8 * CONDITION), None)
        _launch_threads()  # sets numba's own symbol, which this then replaces
        callback = kept(CFunc(_parallel_for, ((types.intp,) * 8, types.void), {}, {}))
        callback.compile()
        llvmlite.binding.add_symbol("numba_parallel_for", callback.address)

    def grow(self, num_threads: int) -> None:
        """Start helpers until there are `num_threads` with the caller."""
        while self._num_helpers < num_threads - 1:
            self._num_helpers += 1
            name = f"kernels-{self._num_helpers}"
            threading.Thread(target=_serve, args=(_control_address,), name=name, daemon=True).start()
