"""Keeps the machine code of compiled CPU kernels on disk between runs.

numba's own cache raises at a file that is damaged or cannot be written, and loads code that was compiled with
an older version of a function from another file. Here code is used only if it is whole and was compiled from
the present sources by the present libraries; else it is compiled anew, and replaced where that is possible.
"""

import hashlib
import logging
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from kernels.cpu.not_kept import check_may_compile

logger = logging.getLogger("monoloop.kernels")

NEEDED_BYTES = 20_000_000
_VERSIONS = (numba.__version__, llvmlite.__version__, sys.version)


def cache_folder() -> Path:
    """Return the folder for compiled kernels: $NUMBA_CACHE_DIR, else a folder in the user's cache.

    Raises RuntimeError if the user has no home folder.
    """
    if numba.config.CACHE_DIR:
        return Path(numba.config.CACHE_DIR)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "monoloop" / "kernels"


def has_room() -> bool:
    """Return True if the folder for compiled kernels takes files, and all of them."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache_folder()):
            return shutil.disk_usage(cache_folder()).free >= NEEDED_BYTES
    except (OSError, RuntimeError):
        return False


def kept(function: Any) -> Any:
    """Return what numba made of a function, whose machine code is kept on disk from now on."""
    function._cache = _CodeCache(function.__wrapped__)
    return function


class _CodeCache(NullCache):  # type: ignore[misc]
    """The cache of one function, one file for each signature and CPU: numba calls its methods.

    A file is a SHA-256 of sources, versions and code, then the code. Those of another installation, CPU or
    version of Python have other names.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        assert function.__closure__ is None, f"{function} takes values from around it, which are not compared"
        source = Path(function.__code__.co_filename)
        self._name, self._place = f"{source.stem}.{function.__qualname__}", str(source.resolve().parent)
        line = function.__code__.co_firstlineno
        self._stamp = _hash(*_VERSIONS, _sources(), source.read_bytes(), str(line))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code for a signature; None if there is none that can be used. Raises NotKept."""
        target_context.refresh()
        code = self._read(sig, target_context)
        if code is not None:
            return CompileResult._rebuild(target_context, *pickle.loads(code))
        check_may_compile(self._name)
        return None

    def _read(self, sig: Any, target_context: Any) -> bytes | None:
        try:
            stored = self._path(sig, target_context.codegen()).read_bytes()
        except (OSError, RuntimeError):
            return None
        digest, code = stored[:32], stored[32:]
        return code if digest == _hash(self._stamp, code) else None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write the code for a signature; logs a warning if it cannot be written."""
        assert not data.library.has_dynamic_globals, f"{self._name} has addresses of this process in it"
        code = dumps(data._reduce())
        try:
            path = self._path(sig, data.codegen)
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, _hash(self._stamp, code) + code)
        except OSError as error:
            _warn(f"{error.strerror} in {cache_folder()}")
        except RuntimeError:
            _warn("this user has no home folder")

    def _path(self, sig: Any, codegen: Any) -> Path:
        key = _hash(str(sig), str(codegen.magic_tuple()), str(sys.implementation.cache_tag), self._place)
        return cache_folder() / f"{self._name}-{key.hex()[:16]}.code"


def _replace(path: Path, content: bytes) -> None:
    """Write a file at once: other processes see the old one or the new one."""
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@cache
def _warn(reason: str) -> None:
    logger.warning(
        "compiled CPU kernels cannot be kept (%s), so that every start takes half a minute longer; let "
        "NUMBA_CACHE_DIR name a folder that can be written and has %d MB left",
        reason,
        NEEDED_BYTES // 10**6,
    )


@cache
def _sources() -> bytes:
    """Return a hash of all sources of the CPU kernels, which call each other's functions."""
    return _hash(*(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))


def _hash(*parts: str | bytes) -> bytes:
    """Return a SHA-256 of parts and their lengths."""
    total = hashlib.sha256()
    for part in parts:
        part = part.encode() if isinstance(part, str) else part
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.digest()
