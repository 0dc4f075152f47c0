"""`monoloop` with a probe: its memory, by its C library, Python and the kernel, over a unix socket.

    python -m benchmarks.probed_server SOCKET MODULE serve --port 8000 ...

MODULE is run as the program: `server`, or another with its command line. Each connection to SOCKET gets one
JSON object.
"""

import ctypes
import gc
import json
import os
import runpy
import socket
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

MAX_KINDS = 60
WATCHED = ("Task", "Future", "Watch", "Connection", "ActiveRequest", "Sequence", "Mailbox", "CompiledGrammar")


def main() -> None:
    """Answer probes in a thread, and run the program."""
    path, module, *arguments = sys.argv[1:]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    threading.Thread(target=answer, args=(listener,), daemon=True, name="probe").start()
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def answer(listener: socket.socket) -> None:
    """Answer every connection with the figures of now."""
    while True:
        client, _ = listener.accept()
        with client, suppress(OSError):
            client.sendall(json.dumps(figures()).encode())


def figures() -> dict[str, Any]:
    """Return resident bytes, those of the C library, and numbers of files, threads and objects."""
    kinds = Counter(type(thing).__name__ for thing in gc.get_objects())
    return {
        "rss_bytes": resident_bytes(),
        **heap(),
        "num_files": len(os.listdir("/proc/self/fd")),
        "num_threads": len(os.listdir("/proc/self/task")),
        "num_objects": sum(kinds.values()),
        "kinds": dict(kinds.most_common(MAX_KINDS)) | {name: kinds[name] for name in WATCHED},
    }


def resident_bytes() -> int:
    """Return the bytes of this process that are resident (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def heap() -> dict[str, int]:
    """Return the arenas of glibc's malloc, and their bytes: taken from the system, and free in them.

    Mapped blocks are large ones outside the arenas. Empty where the C library is another.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_info"):
        return {}
    buffer, size = ctypes.c_char_p(), ctypes.c_size_t()
    libc.open_memstream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(buffer), ctypes.byref(size)))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    root = ElementTree.fromstring(ctypes.string_at(buffer, size.value))
    libc.free(buffer)

    def total(name: str, kind: str, attribute: str = "size") -> int:
        return sum(int(found.get(attribute, 0)) for found in root.findall(f"{name}[@type='{kind}']"))

    return {
        "num_arenas": len(root.findall("heap")),
        "arena_bytes": total("system", "current"),
        "free_bytes": total("total", "fast") + total("total", "rest"),
        "mapped_bytes": total("total", "mmap"),
    }


if __name__ == "__main__":
    main()
