"""`monoloop serve` with a checkpoint that cannot be served: one line that names it, and an exit status.

Covers models/errors.py.
"""

import shutil

import pytest

from server import cli
from tests.models.bad_checkpoints import BAD
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("good") / "model")


@pytest.mark.parametrize("name", BAD)
def test_one_line(name, good, tmp_path, capfd):
    folder = shutil.copytree(good, tmp_path / "model")
    BAD[name][0](folder)
    assert cli.main(["serve", "--model", str(folder), "--port", "0"]) == cli.USAGE
    out, err = capfd.readouterr()
    assert out == ""
    (error,) = [line for line in err.splitlines() if "error: " in line]
    assert error.startswith(f"monoloop: error: --model: {folder}")
    assert "Traceback" not in err
