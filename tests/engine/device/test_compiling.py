"""Covers engine/device/compiling.py."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from engine.config import EngineConfig
from engine.device import compiling
from kernels.cpu import compiler
from kernels.cpu.not_kept import check_may_compile
from tests.engine.tiny_engine import tiny_tokenizer
from tests.models.families import make

ROOT = Path(__file__).parents[3]
TOKEN_BUDGET = 32
# Loads the model of the settings on standard input, whose kernels must have been compiled.
LOAD = """
import sys
from engine.config import EngineConfig
from engine.device.runner import ModelRunner
from kernels.cpu.not_kept import without_compiling
from models import catalog

config = EngineConfig.model_validate_json(sys.stdin.readline())
files = catalog.locate(config.model, config.cache_dir)
with without_compiling():
    ModelRunner.load(config, files, config.token_budget, compiles_apart=False)
"""


class Kernel:
    """A kernel that another process, `compile_apart`, compiles or not."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, is_kept: bool = False, can_keep: bool = True
    ) -> None:
        self.is_kept = is_kept
        self.calls: list[str] = []
        monkeypatch.setattr(compiler, "can_keep", lambda: can_keep)
        monkeypatch.setattr(compiling, "compile_apart", lambda config, budget: self.calls.append("apart"))

    def run(self) -> list[str]:
        """Call it as a model does; return what was done."""
        compiling.with_kept_kernels(self._call, EngineConfig(), TOKEN_BUDGET)
        return self.calls

    def _call(self) -> None:
        if not self.is_kept:
            check_may_compile("a kernel")
            self.calls.append("compiled")
        self.calls.append("called")


def test_kernels_that_are_kept_are_only_called(monkeypatch):
    assert Kernel(monkeypatch, is_kept=True).run() == ["called"]


def test_other_kernels_are_compiled_apart_and_what_is_left_here(monkeypatch):
    assert Kernel(monkeypatch).run() == ["apart", "compiled", "called"]
    check_may_compile("a kernel")  # raises nothing from here on


def test_without_a_folder_to_keep_them_kernels_are_compiled_here(monkeypatch):
    assert Kernel(monkeypatch, can_keep=False).run() == ["compiled", "called"]


def test_a_fault_of_the_model_is_raised(monkeypatch):
    monkeypatch.setattr(compiler, "can_keep", lambda: True)

    def fail() -> None:
        raise ValueError("kv_tokens")

    with pytest.raises(ValueError, match="kv_tokens"):
        compiling.with_kept_kernels(fail, EngineConfig(), TOKEN_BUDGET)


@pytest.mark.slow
def test_a_process_that_fails_is_logged(caplog):
    compiling.compile_apart(EngineConfig(model="/nowhere", dtype="float32"), TOKEN_BUDGET)
    assert "the process that compiles CPU kernels ended with 1" in caplog.text


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    """Settings of a tiny model with the default formats of a CPU."""
    make("llama", vocab_size=331).save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), eos_token="<eos>").save_pretrained(tmp_path)
    formats = {"quantization": "int8", "dtype": "float32", "kv_dtype": "int8"}
    return EngineConfig(model=str(tmp_path), token_budget=TOKEN_BUDGET, **formats)


def run(*command: str, config: EngineConfig) -> subprocess.CompletedProcess[str]:
    """Run a Python program with the settings as its input."""
    settings = f"{config.model_dump_json()}\n"
    command = (sys.executable, *command)
    return subprocess.run(command, input=settings, capture_output=True, text=True, timeout=120)


def test_a_process_that_cannot_be_started_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    compiling.compile_apart(EngineConfig(), TOKEN_BUDGET)
    assert "no process compiles CPU kernels ([Errno 2] No such file" in caplog.text


def test_a_process_that_hangs_is_ended(monkeypatch, caplog):
    monkeypatch.setattr(compiling, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(compiling, "PROGRAM", "import time; time.sleep(600)")
    compiling.compile_apart(EngineConfig(), TOKEN_BUDGET)
    assert "ended with -9" in caplog.text


@pytest.mark.slow
def test_the_process_ends_when_its_input_does(config):
    done = run("-c", compiling.PROGRAM, *sys.path, config=config)
    assert done.returncode == compiling.ABANDONED, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not compiler.is_available(), reason="needs numba")
def test_a_model_finds_its_kernels_compiled(config, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    (tmp_path / "engine.py").write_text("raise SystemExit('imported from the current directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *filter(None, sys.path)])
    compiling.compile_apart(config, TOKEN_BUDGET)
    assert "compiled the CPU kernels in" in caplog.text
    monkeypatch.chdir(ROOT)
    done = run("-c", LOAD, config=config)
    assert done.returncode == 0, done.stderr
