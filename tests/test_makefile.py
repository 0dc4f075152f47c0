"""Messages of `make serve` on machines where it cannot work; start of an installed server."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(venv: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `make serve` without the settings of a make that runs these tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", "--no-print-directory", "-C", str(ROOT), "serve", f"VENV={venv}", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def script(path: Path, text: str) -> Path:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_no_python(tmp_path: Path) -> None:
    result = make(tmp_path / "venv", f"PYTHON={tmp_path}/python")
    assert result.returncode != 0
    assert "name a Python 3.11 or newer" in result.stderr


def test_an_old_python(tmp_path: Path) -> None:
    old = script(tmp_path / "python", "exit 1")
    result = make(tmp_path / "venv", f"PYTHON={old}")
    assert result.returncode != 0
    assert "needs Python 3.11 or newer" in result.stderr


def test_a_python_without_ensurepip(tmp_path: Path) -> None:
    bare = script(tmp_path / "python", 'case "$2" in *ensurepip*) exit 1;; esac')
    result = make(tmp_path / "venv", f"PYTHON={bare}")
    assert result.returncode != 0
    assert "apt-get install python3-venv" in result.stderr


def test_a_venv_without_pip(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    script(venv / "bin" / "python", "exit 1")
    result = make(venv)
    assert result.returncode != 0
    assert "holds no pip" in result.stderr
    assert not (venv / ".installed").exists()


def test_an_installed_server_starts_with_the_given_settings(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    script(venv / "bin" / "python", "exit 1")
    script(venv / "bin" / "monoloop", 'echo "$@" "$MONOLOOP_PORT"')
    (venv / ".installed").touch()
    result = make(venv, "MONOLOOP_PORT=9000", "ARGS=--page-size 32")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "serve --page-size 32 9000\n"


def test_the_constraints_pin_what_this_environment_tests_with() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert "torch==2.13.0" in pins
    assert all("==" in pin or pin.startswith("triton>=") for pin in pins), pins
