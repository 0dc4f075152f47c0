"""Sets up the thread of tests on a GPU as the engine sets up its own."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.config import EngineConfig
from engine.device.devices import choose_device, set_up_thread


@contextmanager
def gpu_thread(device: torch.device) -> Iterator[None]:
    """Give this thread a CUDA stream of its own, as capturing graphs needs, and then its earlier one again.

    Skips the test without a GPU; does nothing for the CPU.
    """
    if device.type == "cpu":
        yield
        return
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    earlier = torch.cuda.current_stream()
    config = EngineConfig(device="cuda")
    set_up_thread(config, choose_device(config))
    yield
    torch.cuda.set_stream(earlier)
