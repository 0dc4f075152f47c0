"""Checks of the machine: a line for what is well, and what to do about the rest."""

import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine import check_listeners, check_machine, machine_check
from engine.config import EngineConfig
from engine.machine_check import Finding, obstacle_to_writing


def finding(name: str, **settings: object) -> Finding:
    """Return the last finding of this name, the one with most to say."""
    found = check_machine(EngineConfig(**settings))  # type: ignore[arg-type]
    return [entry for entry in found if entry.name == name][-1]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine_check, "NVIDIA_DEVICE", Path("/nowhere"))


def test_this_machine_is_fit(no_gpu: None, tmp_path: Path) -> None:
    found = check_machine(EngineConfig(cache_dir=tmp_path))
    assert not [entry for entry in found if entry.level == "problem"]
    names = {entry.name for entry in found}
    assert names >= {"torch", "GPU", "triton", "CPU kernels", "memory", "cores", "model cache"}


def test_torch_that_cannot_be_imported_is_all_there_is_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    [found] = check_machine(EngineConfig())
    assert (found.name, found.level) == ("torch", "problem")


def test_a_gpu_that_was_asked_for_and_is_not_there(no_gpu: None) -> None:
    assert finding("GPU", device="cuda").level == "problem"
    assert finding("GPU", device="auto").level == "ok"
    assert finding("GPU", device="cpu").level == "ok"


def test_a_gpu_that_torch_cannot_use(no_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_check, "NVIDIA_DEVICE", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", None)
    found = finding("GPU")
    assert (found.level, found.advice) == (
        "warning",
        "this torch is built without CUDA: install a CUDA build of it",
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "nvidia-smi" in finding("GPU").advice


def test_a_gpu_with_little_free_memory_and_no_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("engine.device.devices.obstacle_to_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = check_machine(EngineConfig(cache_dir=tmp_path))
    [gpu] = [entry for entry in found if entry.name == "GPU"]
    assert gpu.level == "warning" and "A GPU" in gpu.text and "10.0 of 80.0 GB" in gpu.text
    assert [entry.level for entry in found if entry.name == "triton"] == ["problem", "ok"]


def test_numba_that_does_not_compile(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cpu.compiler.is_available", lambda: False)
    found = finding("CPU kernels")
    assert (found.level, found.advice) == ("warning", "unset NUMBA_DISABLE_JIT")


def test_little_memory_and_limits_of_the_process(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_check, "available_memory", lambda: 5 * 10**8)
    limits: Callable[[int], tuple[int, int]] = lambda kind: (  # noqa: E731
        4 * 10**9 if kind == resource.RLIMIT_AS else resource.RLIM_INFINITY,
        resource.RLIM_INFINITY,
    )
    monkeypatch.setattr(resource, "getrlimit", limits)
    free, limit = (entry for entry in check_machine(EngineConfig()) if entry.name == "memory")
    assert free.level == limit.level == "warning"
    assert free.text.startswith("0.5 GB")
    assert "limited to 4.0 GB" in limit.text and limit.advice == "ulimit -v unlimited"


def test_a_folder_that_cannot_be_written(no_gpu: None, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    found = finding("model cache", cache_dir=file / "cache")
    assert (found.level, found.text) == ("warning", f"{file / 'cache'} cannot be written (Not a directory)")
    assert finding("model cache", cache_dir=tmp_path / "new" / "cache").level == "ok"
    assert not (tmp_path / "new").exists()


def test_folders_that_only_trying_shows_to_be_closed() -> None:
    """Root may write there by the permissions, and still cannot."""
    assert obstacle_to_writing(Path("/proc/profiles"))


def test_what_steps_are_written_to_is_tried(tmp_path: Path) -> None:
    check_listeners(EngineConfig(record=tmp_path / "record"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"record: .* cannot be written"):
        check_listeners(EngineConfig(record=tmp_path / "none" / "record"))
