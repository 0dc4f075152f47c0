"""`monoloop doctor`.

Covers server/commands/doctor.py and server/checks.py.
"""

import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import engine
from engine.errors import FetchFailed
from engine.machine_check import Finding
from server import cli
from server.commands import doctor
from tests.server.conftest import ROOT
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take back what the command changes in its process."""
    for name, value in doctor.OFFLINE.items():
        monkeypatch.setenv(name, value)
    logger = logging.getLogger("monoloop")
    before = logger.level, logger.handlers, logger.propagate
    yield
    logger.level, logger.handlers, logger.propagate = before


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a fault."""
    monkeypatch.setattr(engine, "check_machine", lambda config: [Finding("torch", "ok", "9.9")])


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return the last printed line of each name."""
    printed = capsys.readouterr().out.splitlines()
    return {line[9:22].strip(): line[:9] + line[23:] for line in printed}


def test_all_is_well(checkpoint: Path) -> None:
    """A process of its own, without a network."""
    command = [sys.executable, "-m", "server", "doctor", str(checkpoint), "--port", "0", "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "ok       port          127.0.0.1:0 is free\n" in done.stdout
    assert f"ok       model         {checkpoint.name}: weights of 0.00 GB" in done.stdout


@pytest.mark.usefixtures("healthy")
def test_a_port_that_is_taken(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["doctor", str(checkpoint), "--port", str(port)]) == 1
    line = lines(capsys)["port"]
    assert line.startswith(f"problem  --port {port}: cannot listen")
    assert f"ss -ltnp 'sport = :{port}'" in line


@pytest.mark.usefixtures("healthy")
def test_a_model_that_has_to_be_fetched_is_no_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "owner/name", "--port", "0", "--cache-dir", str(tmp_path)]) == 0
    line = lines(capsys)["model"]
    assert line.startswith("warning  owner/name is not on this machine")
    assert line.endswith("`monoloop pull owner/name` fetches it now")


@pytest.mark.usefixtures("healthy")
def test_models_that_cannot_be_loaded(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert cli.main(["doctor", str(tmp_path), "--port", "0"]) == 1
    assert lines(capsys)["model"].startswith("problem  MODEL: ")
    weights.unlink()
    assert cli.main(["doctor", str(tmp_path), "--port", "0"]) == 1
    assert "holds no .safetensors file" in lines(capsys)["model"]
    assert cli.main(["doctor", str(checkpoint), "--max-model-len", "100000", "--port", "0"]) == 1
    assert lines(capsys)["model"].startswith("problem  --max-model-len: ")

    def fetch(config: object) -> None:
        raise FetchFailed("no network")

    monkeypatch.setattr(engine, "check_model", fetch)
    assert cli.main(["doctor", "owner/name", "--port", "0"]) == 1
    assert "`monoloop pull owner/name` fetches what is missing" in lines(capsys)["model"]


@pytest.mark.usefixtures("healthy")
@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("--profile-dir", "/proc/x", "cannot be written"),
        ("--record", "/proc/x", "cannot be written"),
        ("--open-paths", "/helth", "there is nothing to read (GET) at /helth; did you mean /health?"),
        ("--open-paths", "/v1/completions", "there is nothing to read (GET) at /v1/completions"),
    ],
)
def test_settings_that_end_serve_are_problems(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    setting: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.setattr("faulthandler.enable", lambda: None)  # it needs the real stderr
    assert cli.main(["doctor", str(checkpoint), "--port", "0", setting, value]) == 1
    line = lines(capsys)["settings"]
    assert line.startswith(f"problem  {setting}") and message in line
    assert cli.main(["serve", str(checkpoint), "--port", "0", setting, value]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("healthy")
def test_what_can_be_opened_is_no_problem(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = ["--profile-dir", str(tmp_path / "profiles"), "--record", str(tmp_path / "record")]
    opened = ["--open-paths", "/,/docs,/openapi.json,/v1/models/a/b"]
    assert cli.main(["doctor", str(checkpoint), "--port", "0", *new, *opened]) == 0
    assert not list(tmp_path.iterdir()), "nothing is left of the check"


@pytest.mark.usefixtures("healthy")
def test_wrong_settings_do_not_end_the_check(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "check_model", lambda config: pytest.fail(config.model))
    monkeypatch.setattr(doctor, "_model", lambda settings: Finding("model", "ok", settings.engine.model))
    assert cli.main(["doctor", str(checkpoint), "--page-size", "7"]) == 1
    found = lines(capsys)
    assert found["settings"].startswith("problem  --page-size: ")
    assert {"torch", "port", "model"} <= set(found)


def test_without_torch_the_model_is_not_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        engine, "check_machine", lambda config: [Finding("torch", "problem", "broken", "mend it")]
    )
    assert cli.main(["doctor", "--port", "0"]) == 1
    found = lines(capsys)
    assert found["torch"] == "problem  broken; mend it"
    assert "model" not in found


@pytest.mark.usefixtures("healthy")
def test_few_open_files_and_no_uvloop(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "file_limit", lambda: 1024)
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert cli.main(["doctor", str(checkpoint), "--port", "0"]) == 0
    found = lines(capsys)
    assert found["open files"].startswith("warning  at most 1,024")
    assert found["uvloop"].startswith("warning  not installed")
