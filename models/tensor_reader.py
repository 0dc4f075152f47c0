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
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch
from torch import Tensor

from models.errors import ModelError
from models.safetensors_file import StoredTensor

T = TypeVar("T")
R = TypeVar("R")

NUM_THREADS = 4  # to an H200, from the page cache: 2 threads read 10 GB/s, 4 18 GB/s, 8 20 GB/s
PIECE_BYTES = 16 << 20  # read at once; for a GPU each thread has two pinned buffers of this size


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

        def read(piece: _Piece) -> Tensor | None:
            try:
                fill(piece.out, files[piece.file], piece.start)
            except OSError as error:
                raise ModelError(f"{piece.file} cannot be read: {error.strerror or error}") from error
            return piece.ends

        for ended in read_ahead(_pieces(tensors, device), read):
            if ended is not None:
                yield ended


@dataclass(frozen=True)
class _Piece:
    """Bytes `out` [num_bytes] uint8 of a tensor, at `start` in the file; the last one `ends` the tensor."""

    file: Path
    start: int
    out: Tensor
    ends: Tensor | None


def _pieces(tensors: Iterable[StoredTensor], device: torch.device) -> Iterator[_Piece]:
    """Allocate each tensor on the device and yield its pieces, so that several threads read a large one."""
    for stored in tensors:
        values = torch.empty(stored.shape, dtype=stored.dtype, device=device)
        *others, last = torch.split(values.flatten().view(torch.uint8), PIECE_BYTES)
        start = stored.start
        for out in others:
            yield _Piece(stored.file, start, out, None)
            start += PIECE_BYTES
        yield _Piece(stored.file, start, last, values)


def same_values(a: StoredTensor, b: StoredTensor) -> bool:
    """Return True for tensors of one shape, dtype and content. Raises ModelError, naming a file."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    try:
        with a.file.open("rb") as first, b.file.open("rb") as second:
            first.seek(a.start)
            second.seek(b.start)
            sizes = (min(PIECE_BYTES, a.num_bytes - done) for done in range(0, a.num_bytes, PIECE_BYTES))
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
    """Fills tensors on a GPU through two pinned buffers of each thread, on the stream of its creator.

    Tensors that the creator made in inference mode can be filled in that mode only, which each thread has of
    its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._inference = torch.is_inference_mode_enabled()
        self._of_thread = threading.local()

    def __call__(self, out: Tensor, file: BinaryIO, start: int) -> None:
        if not hasattr(self._of_thread, "buffers"):
            self._of_thread.buffers = [_pinned_buffer(), _pinned_buffer()]
        self._of_thread.buffers.reverse()
        buffer, copied = self._of_thread.buffers[0]
        buffer = buffer[: len(out)]
        copied.synchronize()  # returns at once before the first copy
        _fill_on_cpu(buffer, file, start)
        with torch.inference_mode(self._inference), torch.cuda.stream(self._stream):
            out.copy_(buffer, non_blocking=True)
            copied.record()


def _pinned_buffer() -> tuple[Tensor, torch.cuda.Event]:
    """Return a buffer and the event that its last copy records."""
    buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
    return buffer, torch.cuda.Event()  # type: ignore[no-untyped-call]
