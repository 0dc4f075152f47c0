"""Chooses the device and the dtype, sets up its thread, and words the errors when it cannot be used."""

import logging
from functools import cache

import torch

from engine.config import EngineConfig
from engine.errors import DeviceLost
from engine.machine import cpu_hints, keep_freed_memory, num_cores, num_visible_cores
from kernels.cpu.compiler import set_num_threads
from kernels.dispatch import HAS_TRITON
from models.loader import default_dtype

logger = logging.getLogger("monoloop.engine")

MIN_CAPABILITY = (8, 0)  # Ampere: the first that computes in bfloat16 and copies asynchronously


def raise_if_lost(error: Exception) -> None:
    """Raise DeviceLost if the device does not answer any more: after some errors no call to CUDA succeeds."""
    try:
        torch.cuda.synchronize()
    except Exception:
        raise DeviceLost(f"The device has failed: {str(error).splitlines()[0]}") from error


def does_not_fit(device: torch.device) -> str:
    """Return the end of a message about something too large, with the numbers."""
    free, total = torch.cuda.mem_get_info(device)
    return f"does not fit into the memory of {device}: {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free"


def set_up_thread(config: EngineConfig, device: torch.device) -> None:
    """Give the calling thread its CPU threads, or its own CUDA stream: both belong to a thread."""
    threads = num_threads(config.threads)
    torch.set_num_threads(threads)
    set_num_threads(threads)
    if device.type == "cpu":
        keep_freed_memory()
        for hint in cpu_hints():
            _warn_once(hint)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))


def num_threads(asked: int | None) -> int:
    """Return how many CPU threads to compute with: as many as asked, but never more than there are cores.

    More are slower, and OpenMP ends the process when it cannot start them.
    """
    if asked is None:
        return num_cores()
    most = num_visible_cores()
    if asked > most:
        _warn_once(f"threads: {asked} is more than the cores of this process; {most} are used")
    return min(asked, most)


@cache
def _warn_once(message: str) -> None:
    """Log a warning, once in a process: several threads are set up in one start."""
    logger.warning("%s", message)


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Return the dtype that the model computes in: that of the settings, or the best of the device."""
    if config.dtype == "auto":
        return default_dtype(device)
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def choose_device(config: EngineConfig) -> torch.device:
    """Return the device the settings ask for. Raises ValueError when it cannot be used."""
    if config.device == "cpu":
        return torch.device("cpu")
    obstacle = obstacle_to_cuda()
    if obstacle is None:
        return torch.device("cuda", 0)
    if config.device == "cuda":
        raise ValueError(f"device: cuda was asked for, but {obstacle}")
    if torch.cuda.is_available():
        logger.warning("the GPU is not used, the CPU is: %s", obstacle)
    return torch.device("cpu")


def obstacle_to_cuda() -> str | None:
    """Return why steps cannot be computed on a CUDA device; None if they can."""
    if not torch.cuda.is_available():
        return "torch finds no usable CUDA device"
    if not HAS_TRITON:
        return "triton, which compiles the kernels, is not installed"
    capability = torch.cuda.get_device_capability(0)
    if capability < MIN_CAPABILITY:
        needed, there = (".".join(map(str, version)) for version in (MIN_CAPABILITY, capability))
        return f"{torch.cuda.get_device_name(0)} has compute capability {there}, and {needed} is needed"
    return None
