"""Python that runs on one thread and may be ended by another: its time is up, or nobody waits any more."""

import asyncio
import threading
import time
from collections.abc import Callable
from ctypes import c_int, c_ulong, py_object, pythonapi
from typing import TypeVar

T = TypeVar("T")
LOOK_SECONDS = 1.0

# int PyThreadState_SetAsyncExc(unsigned long thread, PyObject *exception)
_set_async_exception = pythonapi.PyThreadState_SetAsyncExc
_set_async_exception.argtypes = (c_ulong, py_object)
_set_async_exception.restype = c_int


class Interrupted(BaseException):
    """Raised inside the work. No Exception, or a handler in it might take it for one of its own."""


class Interruptible:
    """One piece of work. It can end between two bytecodes only: a long call into C is finished first."""

    __slots__ = ("_lock", "_thread", "_was_interrupted", "began", "is_unwanted")

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock  # held while an interruption is sent
        self._thread = 0
        self._was_interrupted = False
        self.began = 0.0
        self.is_unwanted = False

    @property
    def is_running(self) -> bool:
        """Whether run() has begun and not ended."""
        return self._thread != 0

    @property
    def is_over(self) -> bool:
        """Whether run() has ended."""
        return self.began > 0 and self._thread == 0  # in this order: run() sets the thread first

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns, on the thread that is to do it. Raises Interrupted, or what `work` raises.

        Never is an interruption raised after it: what the thread does then is somebody else's.
        """
        try:
            self._thread = threading.get_ident()
            self.began = time.monotonic()
            if self._was_interrupted:
                raise Interrupted
            return work()
        finally:
            # Python raises it at calls, at jumps back and where a function begins: not before this is done.
            self._thread = 0
            is_settled = not self._was_interrupted
            while not is_settled:  # one may wait to be raised, and another be on its way
                try:
                    with self._lock:
                        is_settled = True  # whoever sends one has sent it
                        # In place of what waits, if anything does. To take that back would leave the
                        # interpreter on the watch for it, and CPython 3.11 then stands still once it traces.
                        _set_async_exception(threading.get_ident(), py_object(Interrupted))
                    while True:
                        pass
                except Interrupted:
                    pass

    def interrupt(self) -> None:
        """End it, if it runs; if it has not begun, it never will."""
        with self._lock:
            self._was_interrupted = True  # first, as run() looks at it last
            if self._thread:
                _set_async_exception(self._thread, py_object(Interrupted))


class Watch:
    """Ends work that runs for longer than `seconds`, or that nobody wants any more. For the event loop."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._look_seconds = min(seconds, LOOK_SECONDS)
        self._lock = threading.Lock()
        self._watched: set[Interruptible] = set()
        self._is_looking = False

    def over(self) -> Interruptible:
        """A new piece of work, watched from its beginning until dismiss()."""
        work = Interruptible(self._lock)
        self._watched.add(work)
        if not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_later(self._look_seconds, self._look)
        return work

    def dismiss(self, work: Interruptible) -> None:
        """Nobody waits for it any more: it ends, if it has not."""
        if not work.is_over:
            work.is_unwanted = True
            work.interrupt()
        if not work.is_running:
            self._watched.discard(work)

    def _look(self) -> None:
        """Interrupt what is due, also once more: what is raised in a finalizer is lost."""
        latest = time.monotonic() - self.seconds
        for work in list(self._watched):
            if work.is_running and (work.is_unwanted or work.began <= latest):
                work.interrupt()
            elif work.is_unwanted:
                self._watched.discard(work)
        self._is_looking = bool(self._watched)
        if self._is_looking:
            asyncio.get_running_loop().call_later(self._look_seconds, self._look)
