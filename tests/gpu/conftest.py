"""What the tests on a GPU share. Run them with `make test-gpu`, or pytest -m gpu."""

import gc
from collections.abc import Iterator

import pytest
import torch

from engine.config import EngineConfig
from engine.device.devices import set_up_thread

DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="session")
def device() -> Iterator[torch.device]:
    """The GPU, with a stream of its own for this thread; without one the test is skipped."""
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    set_up_thread(EngineConfig(), DEVICE)
    yield DEVICE
    if DEVICE.type == "cuda":
        torch.cuda.set_stream(torch.cuda.default_stream(DEVICE))


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    """What a test held must not lie beside what the next one makes: an 8B model takes 16 GB."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
