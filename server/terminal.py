"""Lines for the person at the terminal: on stderr, since results go to standard output."""

import io
import logging
import os
import select
import sys
from contextlib import suppress

STATUS = logging.getLogger("monoloop.status")  # has a handler only if the log is JSON

USAGE = 2  # exit code of argparse for wrong arguments; a wrong setting is one of those

# How long a message may wait for a reader that has fallen behind. Without a limit, a log collector that hangs
# would stop the event loop, and with it all streams.
PATIENCE_SECONDS = 1.0
PIPE_BUF = 4096  # a pipe that takes a byte takes as many at once


class LossyFile(io.RawIOBase):
    """A file for messages: what cannot be written, since nothing reads it (any more), is dropped."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._patience_seconds = PATIENCE_SECONDS

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return True for a terminal that is still there."""
        return os.isatty(self._descriptor)

    def write(self, data: "memoryview | bytes") -> int:  # type: ignore[override]
        """Write all of `data`, or as much as is possible."""
        rest = memoryview(data)
        with suppress(OSError):
            while rest and self._has_room():
                rest = rest[os.write(self._descriptor, rest[:PIPE_BUF]) :]
        return len(data)

    def _has_room(self) -> bool:
        """Wait for room, but not again before there has been some."""
        _, writable, _ = select.select((), (self._descriptor,), (), self._patience_seconds)
        self._patience_seconds = PATIENCE_SECONDS if writable else 0.0
        return bool(writable)


def set_up_streams() -> None:
    """Let no message end the process: closed or full streams drop it, and no character is a fault.

    A message that cannot be written would otherwise end the loading of a model, and a letter that the
    terminal's encoding lacks the answer it is in. Bytes of the input that are no text become U+FFFD.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if sys.stdout is None:  # closed at start
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end of the process
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    elif sys.stderr is (given := sys.__stderr__) and given is not None:
        file = LossyFile(given.fileno())  # no buffer: each message is one write
        sys.stderr = io.TextIOWrapper(
            file, encoding=given.encoding, errors="backslashreplace", write_through=True
        )


def printable(text: str) -> str:
    """Return a text with control characters escaped: it may quote files of a model, or a client."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def print_status(text: str, level: int = logging.INFO) -> None:
    """Print a line about what the command is doing; where the log is JSON, it is a record of that level."""
    if STATUS.handlers:
        STATUS.log(level, "%s", text)
        return
    sys.stderr.write(f"monoloop: {printable(text)}\n")
    sys.stderr.flush()


def fail(message: str, code: int) -> int:
    """Print what is wrong, one error per line, and return the exit code."""
    for line in message.split("\n"):
        print_status(f"error: {line}", logging.ERROR)
    return code


def megabytes(num_bytes: int) -> str:
    """Return a size as people read it: `1,234 MB`."""
    return f"{num_bytes / 1e6:,.0f} MB"
