"""Profiles the device thread with torch's profiler: each op of each step, on the CPU and on the device."""

import asyncio
from pathlib import Path
from typing import Any

from engine.device.thread import DeviceThread
from engine.errors import InvalidRequest


class Profile:
    """Begins and ends profiles, one at a time. Steps are slower meanwhile, and memory grows with each."""

    def __init__(self, device: DeviceThread) -> None:
        self._device = device
        self._profiler: Any = None

    async def start(self) -> None:
        """Record from now on. Raises InvalidRequest if that is being done."""
        from torch.profiler import profile  # takes 0.1 s

        if self._profiler is not None:
            raise InvalidRequest("A profile is being recorded: stop it first.")
        self._profiler = profile()  # of whatever this machine has
        await self._device.call(self._profiler.start)  # it records the thread that starts it

    async def stop(self, path: Path) -> None:
        """Write what was recorded to a new file, in Chrome's trace format, gzipped if its name ends in .gz.

        Raises InvalidRequest if nothing is being recorded, OSError if the file cannot be written.
        """
        if self._profiler is None:
            raise InvalidRequest("No profile is being recorded: start one first.")
        profiler, self._profiler = self._profiler, None
        await self._device.call(profiler.stop)
        await asyncio.to_thread(_save, profiler, path)


def _save(profiler: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb"):  # the profiler itself only logs what fails
        pass
    profiler.export_chrome_trace(str(path))
