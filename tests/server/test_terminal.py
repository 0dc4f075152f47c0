"""Terminals, pipes and users as they are: none of them ends a command."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from server import cli
from server.cli import BROKEN_PIPE
from server.terminal import USAGE, fail, megabytes, print_status
from tests.server.conftest import ROOT

WITHOUT_HOME = """
import os, pwd, sys
def no_entry(uid):
    raise KeyError(uid)
pwd.getpwuid = no_entry
os.environ.pop("HOME", None)
os.environ.pop("XDG_CACHE_HOME", None)
from server import cli
sys.exit(cli.main(sys.argv[1:]))
"""
PRINTS = """
import sys
from server.terminal import print_status, set_up_streams
set_up_streams()
print_status("modèle 模型")
sys.stdout.write("réponse 模型\\n")
"""


def run(*command: str, shell: str = "", **environment: str) -> "subprocess.CompletedProcess[bytes]":
    """Run a command of this Python with `shell` after it, in an environment without this one's variables."""
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" "$@" {shell}', sys.executable, *command],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        timeout=120,
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "ascii:strict"])
def test_no_character_is_a_fault(encoding: str) -> None:
    done = run("-c", PRINTS, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert b"\\u6a21\\u578b" in done.stdout
    assert b"\\u6a21\\u578b" in done.stderr


@pytest.mark.parametrize("shell", ["2>&-", ">&-", ">&- 2>&-"])
def test_closed_streams_are_no_fault(shell: str) -> None:
    done = run("-c", PRINTS, shell=shell, PYTHONUTF8="1")
    assert done.returncode == 0, done.stderr
    assert ("modèle".encode() in done.stderr) == ("2>" not in shell)
    assert ("réponse".encode() in done.stdout) == (">&- 2" not in shell and shell != ">&-")


def test_who_reads_the_output_may_leave() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from server import cli; sys.exit(cli.main())", "--help"],
        cwd=ROOT,
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=120,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (BROKEN_PIPE, b"")


def test_input_that_is_no_text_is_no_fault() -> None:
    done = run(
        "-c",
        "from server.terminal import set_up_streams; set_up_streams(); print(ascii(input()))",
        shell=r"<<'END'" + "\n\udcff hi\nEND\n",
        PYTHONUTF8="1",
    )
    assert (done.returncode, done.stdout) == (0, b"'\\ufffd hi'\n"), done.stderr


def test_a_log_pipe_that_is_closed_does_not_end_the_start(tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.server.serve_fake", "serve", "--port", "0"],
        cwd=ROOT,
        env={**os.environ, "FAKE_LOADED": str(loaded)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    try:
        url = next(found[0] for line in server.stderr if (found := re.search(r"http://[\d.:]+", line)))
        server.stderr.close()
        assert httpx.get(f"{url}/ready").status_code == 503
        loaded.touch()
        deadline = time.monotonic() + 20
        while httpx.get(f"{url}/ready").status_code != 200:
            assert time.monotonic() < deadline
            assert server.poll() is None
            time.sleep(0.02)
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("model", ["SmolLM2-135M-Instruct", "owner/name", "~/nowhere"])
def test_a_user_without_a_home_is_told_what_to_set(model: str) -> None:
    done = run("-c", WITHOUT_HOME, "pull", model)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    if "/n" not in model or model[0] != "~":
        assert b"--cache-dir" in done.stderr


def test_a_user_without_a_home_has_an_empty_cache() -> None:
    done = run("-c", WITHOUT_HOME, "list")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_windows_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert cli.main(["serve"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "monoloop: error: Windows is not supported: run monoloop in WSL 2 or in a container"
    ]


def test_status_does_not_mix_with_results(capsys: pytest.CaptureFixture[str]) -> None:
    print_status("loading")
    assert capsys.readouterr() == ("", "monoloop: loading\n")


def test_each_error_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail("no port\nno model", USAGE) == USAGE
    assert capsys.readouterr() == ("", "monoloop: error: no port\nmonoloop: error: no model\n")


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_status("a\x1b[31m\r日本\u202eb\ud800")
    assert capsys.readouterr().err == "monoloop: a\\x1b[31m\\r日本\\u202eb\\ud800\n"


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 MB"), (1_499_999, "1 MB"), (1_234_000_000, "1,234 MB")]
)
def test_sizes_are_in_decimal_megabytes(num_bytes: int, text: str) -> None:
    assert megabytes(num_bytes) == text
