"""Times calls on a device, and measures its bandwidth and matmul rate."""

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# Larger than any L2 cache: writing it evicts all inputs.
FLUSH_BYTES = 256 << 20
COPY_BYTES = 1 << 30
CPU_COPY_BYTES = 1 << 26
MATMUL_SIZE = 8192
CPU_MATMUL_SIZE = 512


@dataclass(frozen=True)
class Ceilings:
    """The highest rates of a device: a large copy (bytes read plus bytes written) and a large product."""

    device: str
    bytes_per_second: float
    flops_per_second: float


class Probe:
    """Times calls on one device, and makes random tensors of `dtype` on it."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.cuda = device.type == "cuda"
        self._flush = torch.empty(FLUSH_BYTES if self.cuda else 1, dtype=torch.int8, device=device)

    def randn(self, *shape: int) -> torch.Tensor:
        """Return normally distributed numbers [*shape]."""
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def drain(self) -> None:
        """Wait for the device; nothing to do on a CPU."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def wall_seconds(self, call: Callable[[], object], repeat: int) -> float:
        """Return the median time of a call and all work it starts, launches included."""
        times = []
        for _ in range(repeat + 2):
            self.drain()
            start = time.perf_counter()
            call()
            self.drain()
            times.append(time.perf_counter() - start)
        return statistics.median(times[2:])

    def device_seconds(self, call: Callable[[], object], repeat: int = 30) -> float:
        """Return the median time of a call on the device; on a CPU, of the call.

        The L2 cache is cold, as in a model, where weights pass through it. The flush before a call also hides
        its launch from the clock.
        """
        if not self.cuda:
            return self.wall_seconds(call, 3)
        for _ in range(3):
            call()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
        for start, end in events:
            self._flush.zero_()
            start.record()
            call()
            end.record()
        self.drain()
        return statistics.median(float(start.elapsed_time(end)) for start, end in events) / 1e3

    def ceilings(self) -> Ceilings:
        """Measure the highest rates of the device; on a CPU with small inputs, to save time."""
        size = COPY_BYTES if self.cuda else CPU_COPY_BYTES
        source = torch.empty(size, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        copy_seconds = self.device_seconds(lambda: target.copy_(source))
        n = MATMUL_SIZE if self.cuda else CPU_MATMUL_SIZE
        a, b = self.randn(n, n), self.randn(n, n)
        return Ceilings(
            torch.cuda.get_device_name(self.device) if self.cuda else platform.processor() or "cpu",
            2 * size / copy_seconds,
            2 * n**3 / self.device_seconds(lambda: a @ b),
        )
