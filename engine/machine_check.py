"""Checks what the engine needs of a machine: libraries, GPU, compiled kernels, memory, cores, folders."""

import os
import platform
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal

from engine.config import EngineConfig
from engine.machine import available_memory, cpu_hints, num_cores, num_visible_cores

Level = Literal["ok", "warning", "problem"]
GB = 10**9
LOW_MEMORY_BYTES = GB  # the default model takes 0.6 to 0.9 GB
LOW_DISK_BYTES = GB
NVIDIA_DEVICE = Path("/dev/nvidia0")


@dataclass(frozen=True)
class Finding:
    """One line of a check: what was looked at, how it is, and what to do about it ("" if nothing).

    With a warning the engine runs, but slower or with less than it could; with a problem it does not run.
    """

    name: str
    level: Level
    text: str
    advice: str = ""


def check_machine(config: EngineConfig) -> Iterator[Finding]:
    """Yield findings about everything but the model."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of it cannot be loaded
        yield Finding("torch", "problem", f"cannot be imported: {error}", "install monoloop anew into a venv")
        return
    yield Finding("torch", "ok", str(torch.__version__))
    yield from _gpu(config)
    yield _cpu_kernels()
    yield from _memory()
    yield Finding("cores", "ok", f"{num_cores()} to compute with, {num_visible_cores()} visible")
    for hint in cpu_hints():
        yield Finding("cores", "warning", hint)
    yield from _folders(config)


def _gpu(config: EngineConfig) -> Iterator[Finding]:
    """Yield findings about the GPU, and about what compiles kernels for it."""
    import torch

    from engine.device.devices import obstacle_to_cuda

    triton = _version("triton")
    obstacle = None if config.device == "cpu" else obstacle_to_cuda()
    if config.device == "cpu":
        yield Finding("GPU", "ok", "not used: the setting device is cpu")
    elif obstacle is None:
        free, total = torch.cuda.mem_get_info()
        gpu = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
        text = f"{gpu}, {free / GB:.1f} of {total / GB:.1f} GB free"
        if free < total / 2:
            yield Finding("GPU", "warning", text, "other programs use its memory; nvidia-smi lists them")
        else:
            yield Finding("GPU", "ok", text)
        if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
            advice = "install gcc, or let CC name a compiler"
            yield Finding("triton", "problem", "needs a C compiler, and there is none", advice)
    elif config.device == "cuda" or NVIDIA_DEVICE.exists():
        level: Level = "problem" if config.device == "cuda" else "warning"
        yield Finding("GPU", level, f"not used: {obstacle}", _gpu_advice(triton))
    else:
        yield Finding("GPU", "ok", "none found: the CPU computes")
    yield Finding("triton", "ok", triton or "not installed; only GPUs need it")


def _gpu_advice(triton: str | None) -> str:
    """Return what to do about a GPU that cannot be used."""
    import torch

    if torch.version.cuda is None:
        return "this torch is built without CUDA: install a CUDA build of it"
    if torch.cuda.is_available():
        return "" if triton else "pip install triton"
    return "see if nvidia-smi shows the GPU, with a driver that is new enough; a container needs --gpus all"


def _cpu_kernels() -> Finding:
    """Return the finding about the kernels that numba compiles."""
    from kernels.cpu.compiler import is_available
    from kernels.cpu.dot_products import num_lanes

    numba = _version("numba")
    if not is_available():
        text = (
            "numba is not installed" if numba is None else "numba does not compile: NUMBA_DISABLE_JIT is set"
        )
        advice = "pip install numba" if numba is None else "unset NUMBA_DISABLE_JIT"
        return Finding("CPU kernels", "warning", f"{text}; torch computes, several times slower", advice)
    instructions = {32: "AVX512", 16: "AVX2"}.get(num_lanes(), f"{platform.machine()} without AVX2")
    return Finding("CPU kernels", "ok", f"numba {numba}, {instructions}")


def _memory() -> Iterator[Finding]:
    """Yield findings about memory: what is free, and the limits of this process."""
    free, total = available_memory(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = f"{free / GB:.1f} GB can be allocated, of {total / GB:.1f} GB of the machine"
    if free < LOW_MEMORY_BYTES:
        advice = "end other programs, or raise the container's limit: the default model takes 0.6 to 0.9 GB"
        yield Finding("memory", "warning", text, advice)
    else:
        yield Finding("memory", "ok", text)
    for what, kind, option in (
        ("address space", resource.RLIMIT_AS, "-v"),
        ("data segment", resource.RLIMIT_DATA, "-d"),
    ):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            text = (
                f"the {what} of this process is limited to {limit / GB:.1f} GB; torch maps more than it uses"
            )
            yield Finding("memory", "warning", text, f"ulimit {option} unlimited")


def _folders(config: EngineConfig) -> Iterator[Finding]:
    """Yield findings about the folders that are written to."""
    from models.catalog import cache_folder
    from models.errors import ModelError

    try:
        yield _folder("model cache", cache_folder(config.cache_dir), "let --cache-dir name another folder")
    except ModelError as error:
        yield Finding("model cache", "warning", str(error))
    if config.cache_dir is None:
        from huggingface_hub.constants import HF_HUB_CACHE

        yield _folder("hub cache", Path(HF_HUB_CACHE), "let HF_HOME name another folder")
    if _version("numba") is not None:
        from kernels.cpu.code_cache import cache_folder as kernel_folder

        advice = "let NUMBA_CACHE_DIR name another folder, or every start compiles for half a minute"
        try:
            yield _folder("kernel cache", kernel_folder(), advice)
        except RuntimeError:
            yield Finding("kernel cache", "warning", "this user has no home folder", advice)


def _folder(name: str, folder: Path, advice: str) -> Finding:
    """Return the finding about a folder that may not exist yet: it can be made, and files fit into it."""
    if obstacle := obstacle_to_writing(folder):
        return Finding(name, "warning", f"{folder} cannot be written ({obstacle})", advice)
    free = shutil.disk_usage(_existing(folder)).free
    text = f"{folder}, {free / GB:.1f} GB free"
    return Finding(name, "warning", text, advice) if free < LOW_DISK_BYTES else Finding(name, "ok", text)


def obstacle_to_writing(folder: Path) -> str | None:
    """Return why no file can be made in a folder, which may not exist yet; None if one can."""
    try:
        with TemporaryFile(dir=_existing(folder)):  # without a name: nothing can be left behind
            return None
    except OSError as error:
        return error.strerror


def _existing(folder: Path) -> Path:
    """Return the folder, or else the closest one around it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _version(package: str) -> str | None:
    """Return the version of an installed package; None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
