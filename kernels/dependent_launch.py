"""Programmatic dependent launch: a kernel is put on the device while the one before it still runs.

Between two kernels of a stream lie a few microseconds in which the device drains, tells, and starts again.
A kernel launched this way has started when its predecessor ends, and waits in `wait_for_previous` before it
touches anything but constants. NVIDIA GPUs from Hopper on (CUDA C++ Programming Guide, "Programmatic
Dependent Launch and Synchronization").
"""

from functools import cache
from typing import Any

import torch

from kernels.dispatch import tl, triton


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Return when every kernel before this one has ended and what it wrote can be read."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """Let the kernel after this one start now, if it was launched early, and wait for the end of this one."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@cache
def early(device: torch.device) -> dict[str, Any]:
    """Return launch arguments for kernels with an EARLY flag on `device`."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}
