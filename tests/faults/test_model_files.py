"""Model files that are cut off or have wrong bits: refused by name, or loaded as what they then say."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from models.decoder import Decoder
from models.errors import ModelError
from models.loader import load
from tests.models.gguf_files import write_gguf
from tests.models.harness import CPU, files_of
from tests.server.conftest import ROOT
from tests.tiny_checkpoint import tiny_llama, write_checkpoint

Where = Callable[[int], int]  # of a size
HEADER_BYTES = 600  # at least


@pytest.fixture(scope="module", params=["safetensors", "gguf"])
def model_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the weights of a tiny model."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    if request.param == "safetensors":
        return write_checkpoint(folder) / "model.safetensors"
    folder.mkdir()
    return write_gguf(folder / "model.gguf", tiny_llama(0))


def load_file(path: Path) -> Decoder:
    """Return the model that a file is the weights of."""
    return load(files_of(path if path.suffix == ".gguf" else path.parent), torch.float32, CPU)


@pytest.fixture
def damage(model_file: Path) -> object:
    """A function that writes other content into the file; it is whole again after the test."""
    content = model_file.read_bytes()
    yield lambda change: model_file.write_bytes(change(content))
    model_file.write_bytes(content)


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.5, 0.9, 1.0])
def test_a_file_that_is_cut_off_is_refused(
    model_file: Path, damage: Callable[..., None], share: float
) -> None:
    load_file(model_file)
    damage(lambda content: content[: min(int(share * len(content)), len(content) - 64)])
    with pytest.raises(ModelError, match=model_file.name) as caught:
        load_file(model_file)
    assert "\n" not in str(caught.value)


def test_wrong_bits_in_the_header_are_another_header_or_refused(
    model_file: Path, damage: Callable[..., None]
) -> None:
    """Any other exception than ModelError fails the test."""
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        at, bit = int(rng.integers(HEADER_BYTES)), int(rng.integers(8))
        damage(lambda content, at=at, bit=bit: flipped(content, at, bit))
        try:
            load_file(model_file)
        except ModelError:
            refused += 1
    assert refused > 30, "the damage was mostly not noticed, so the test shows nothing"


@pytest.mark.parametrize("share", [0.5, 0.9999])
def test_wrong_bits_in_weights_load(model_file: Path, damage: Callable[..., None], share: float) -> None:
    """Neither format has a checksum."""
    damage(lambda content: flipped(content, int(share * (len(content) - 1)), 7))
    load_file(model_file)


def flipped(content: bytes, at: int, bit: int) -> bytes:
    """Return bytes with one bit changed."""
    changed = bytearray(content)
    changed[at] ^= 1 << bit
    return bytes(changed)


def test_a_file_that_is_cut_off_while_it_is_read_leaves_a_trace(tmp_path: Path) -> None:
    """A .gguf file is mapped until the weights are loaded, so the operating system ends the process."""
    path = write_gguf(tmp_path / "model.gguf", tiny_llama(0))
    program = (
        "import faulthandler, os, sys; from pathlib import Path; from models.gguf.file import GGUFFile\n"
        "faulthandler.enable()\n"
        "file = GGUFFile(Path(sys.argv[1]))\n"
        "os.truncate(sys.argv[1], 64)\n"
        "print(sum(int(tensor.raw.sum()) for tensor in file.tensors.values()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGBUS, done.stderr
    assert "Fatal Python error: Bus error" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_a_file_is_not_read_once_its_model_is_loaded(model_file: Path) -> None:
    model = load_file(model_file)
    gc.collect()
    assert str(model_file.parent) not in Path("/proc/self/maps").read_text(), "a change would reach the model"
    del model
