"""What the tests on a GPU share. Run them with `make test-gpu`, or pytest -m gpu."""

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.gpu_thread import gpu_thread

DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="session")
def device() -> Iterator[torch.device]:
    """The GPU, with a stream of its own for this thread; without one the test is skipped."""
    with gpu_thread(DEVICE):
        yield DEVICE


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    """What a test held must not lie beside what the next one makes: an 8B model takes 16 GB."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
