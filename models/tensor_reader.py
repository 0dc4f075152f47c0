"""Reads stored tensors to a device, several at once.

Threads read with `pread`, which releases the GIL and, unlike a mapped file, leaves no pages of the file in
the process. On a CPU they read into the tensor itself; for a GPU into pinned buffers, one of which is filled
while the other is copied.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import BinaryIO, TypeVar

import torch
from torch import Tensor

from models.errors import ModelError
from models.safetensors_file import StoredTensor

T = TypeVar("T")
R = TypeVar("R")

NUM_THREADS = 4
BUFFER_BYTES = 16 << 20  # pinned, twice for each thread


def read_ahead(items: Iterable[T], read: Callable[[T], R]) -> Iterator[R]:
    """Yield `read(item)` of each item in order, while NUM_THREADS threads read the next ones."""
    with ThreadPoolExecutor(NUM_THREADS, "read weights") as pool:
        pending: deque[Future[R]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(read, item))
                if len(pending) > NUM_THREADS:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:  # left after an error, or when the caller stops early
                future.cancel()


def read_tensors(tensors: Iterable[StoredTensor], device: torch.device) -> Iterator[Tensor]:
    """Yield the values of each tensor in order, on the device. Raises ModelError, naming the file.

    On a GPU the copy may not have ended yet; it is ordered before what the caller does on its current stream.
    """
    tensors = list(tensors)
    with ExitStack() as stack:
        try:
            files = {
                path: stack.enter_context(path.open("rb", buffering=0))
                for path in dict.fromkeys(tensor.file for tensor in tensors)
            }
        except OSError as error:
            raise ModelError(f"{error.filename} cannot be read: {error.strerror}") from error
        fill = _GpuFill(device) if device.type == "cuda" else _fill_on_cpu

        def read(job: tuple[StoredTensor, Tensor]) -> Tensor:
            stored, values = job
            try:
                fill(values.flatten().view(torch.uint8), files[stored.file], stored.start)
            except OSError as error:
                raise ModelError(f"{stored.file} cannot be read: {error}") from error
            return values

        # Allocated by the calling thread: the C library keeps a heap per thread, and returns less of many.
        jobs = ((stored, torch.empty(stored.shape, dtype=stored.dtype, device=device)) for stored in tensors)
        yield from read_ahead(jobs, read)


def same_values(a: StoredTensor, b: StoredTensor) -> bool:
    """Return True for tensors of one shape, dtype and content. Raises ModelError, naming a file."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    try:
        with a.file.open("rb") as first, b.file.open("rb") as second:
            first.seek(a.start)
            second.seek(b.start)
            sizes = (min(BUFFER_BYTES, a.num_bytes - done) for done in range(0, a.num_bytes, BUFFER_BYTES))
            return all(first.read(size) == second.read(size) for size in sizes)
    except OSError as error:
        raise ModelError(f"{error.filename or a.file} cannot be read: {error}") from error


def _fill_on_cpu(out: Tensor, file: BinaryIO, start: int) -> None:
    """Fill `out` [num_bytes] uint8 from the bytes of the file at `start`. Raises OSError."""
    view = memoryview(out.numpy().data)
    while view:
        num_bytes = os.preadv(file.fileno(), [view], start)  # at most 2 GiB in one call
        if not num_bytes:
            raise OSError("it ends in the middle of a tensor")
        view, start = view[num_bytes:], start + num_bytes


class _GpuFill:
    """Fills tensors on a GPU through two pinned buffers of each thread, on the stream of its creator."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._of_thread = threading.local()

    def __call__(self, out: Tensor, file: BinaryIO, start: int) -> None:
        if not hasattr(self._of_thread, "buffers"):
            self._of_thread.buffers = [_pinned_buffer(), _pinned_buffer()]
        filled, other = self._of_thread.buffers
        with torch.cuda.stream(self._stream):
            for piece in torch.split(out, BUFFER_BYTES):
                buffer, copied = filled
                copied.synchronize()  # returns at once before the first copy
                _fill_on_cpu(buffer[: len(piece)], file, start)
                piece.copy_(buffer[: len(piece)], non_blocking=True)
                copied.record()
                start += len(piece)
                filled, other = other, filled
        self._of_thread.buffers = filled, other


def _pinned_buffer() -> tuple[Tensor, torch.cuda.Event]:
    """Return a buffer and the event that its last copy records."""
    buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
    return buffer, torch.cuda.Event()  # type: ignore[no-untyped-call]
