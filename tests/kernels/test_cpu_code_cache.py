"""Covers kernels/cpu/code_cache.py."""

import errno
import random
from pathlib import Path

import pytest

from kernels.cpu.compiler import compiled, is_available
from kernels.cpu.not_kept import NotKept, without_compiling

pytestmark = pytest.mark.skipif(not is_available(), reason="needs numba")
if is_available():
    from kernels.cpu import code_cache


def _double(x):
    return 2 * x


def _is_loaded(function=_double) -> bool:
    """Call a function as a new process does; return False if it had to be compiled."""
    kernel = compiled()(function)
    assert kernel(3) == 6
    return kernel.stats.cache_hits.total() == 1


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache folder that is not made yet."""
    code_cache._warn.cache_clear()
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def test_code_is_kept(folder):
    assert not _is_loaded()
    assert _is_loaded()
    assert [file.suffix for file in folder.iterdir()] == [".code"], "and nothing else is left"


def test_without_compiling_only_kept_code_is_called():
    with without_compiling(), pytest.raises(NotKept, match="_double"):
        _is_loaded()
    assert not _is_loaded()
    with without_compiling():
        assert _is_loaded()


def test_a_folder_has_room_or_not(folder, monkeypatch):
    assert code_cache.has_room()
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(code_cache, "NEEDED_BYTES", 1 << 60)
    assert not code_cache.has_room()
    folder.rmdir()
    folder.write_text("a file of that name")
    assert not code_cache.has_room()


DAMAGES = {
    "cut": lambda content: content[:100],
    "empty": lambda content: b"",
    "a bit": lambda content: content[:-50] + bytes([content[-50] ^ 1]) + content[-49:],
    "random": lambda content: random.Random(0).randbytes(len(content)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_replaced(folder, damage):
    _is_loaded()
    (file,) = folder.iterdir()
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    assert not _is_loaded(), "compiled anew"
    assert _is_loaded()


@pytest.mark.parametrize(
    ("part", "value"), [("_VERSIONS", ("another numba",)), ("_sources", lambda: b"another source")]
)
def test_code_of_other_versions_is_replaced(folder, part, value, monkeypatch):
    _is_loaded()
    monkeypatch.setattr(code_cache, part, value)
    assert not _is_loaded()
    assert _is_loaded()
    assert len(list(folder.iterdir())) == 1


def test_code_for_another_cpu_is_not_used(folder, monkeypatch):
    _is_loaded()
    monkeypatch.setattr("numba.core.codegen.JITCPUCodegen.magic_tuple", lambda self: ("another CPU",))
    assert not _is_loaded()
    assert len(list(folder.iterdir())) == 2, "machines may share a folder"


def test_functions_of_one_name_do_not_take_each_others_code():
    def twice(x):
        return 2 * x

    first = twice

    def twice(x):
        return x + x

    assert not _is_loaded(first)
    assert not _is_loaded(twice)


def _fill_disk(monkeypatch, folder):
    def write_a_part(path, content):
        path.open("wb").close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_a_part)


def _take_folder(monkeypatch, folder):
    folder.write_text("a file of that name")


def _take_home(monkeypatch, folder):
    def no_home():
        raise RuntimeError

    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)


@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [(_fill_disk, "No space left"), (_take_folder, "File exists"), (_take_home, "no home folder")],
)
def test_what_cannot_be_kept_is_compiled_with_one_warning(folder, obstacle, reason, monkeypatch, caplog):
    obstacle(monkeypatch, folder)
    for _ in range(2):
        assert not _is_loaded()
    (record,) = caplog.records
    assert reason in record.getMessage() and "NUMBA_CACHE_DIR" in record.getMessage()
    assert not folder.is_dir() or not list(folder.iterdir()), "no part of a file is left"


def test_the_users_cache_is_used_unless_numbas_setting_names_a_folder(folder, monkeypatch, tmp_path):
    assert code_cache.cache_folder() == folder
    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert code_cache.cache_folder() == tmp_path / "monoloop" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert code_cache.cache_folder() == tmp_path / ".cache" / "monoloop" / "kernels"
