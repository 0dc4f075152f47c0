"""The size of the KV pool from the memory of a GPU, in numbers alone."""

import pytest

from engine.device.kv_cache import CUDA_MEMORY_SHARE, cuda_pool_bytes

GIB = 2**30


def test_the_default_is_a_share_of_what_is_free() -> None:
    assert cuda_pool_bytes(60 * GIB, 80 * GIB, 10 * GIB, None) == int(50 * GIB * CUDA_MEMORY_SHARE)


@pytest.mark.parametrize(("utilization", "pool"), [(0.9, 42), (1.0, 50), (0.375, 0), (0.3, -6)])
def test_utilization_is_a_share_of_the_whole_gpu(utilization: float, pool: int) -> None:
    """20 GiB of weights and other programs, 10 GiB of steps, and the pool."""
    assert cuda_pool_bytes(60 * GIB, 80 * GIB, 10 * GIB, utilization) == pytest.approx(pool * GIB)
