"""Profiles the device thread with torch's profiler: each op of each step, on the CPU and on the device."""

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.device.thread import DeviceThread
from engine.errors import InvalidRequest

logger = logging.getLogger("monoloop.engine")

# On two cores, 300 steps of SmolLM2-135M took 0.5 GB, and 3.6 s to write.
MAX_JOBS = 100
POLL_SECONDS = 0.1


class Profile:
    """Begins and ends profiles, one at a time. Steps are slower meanwhile, and memory grows with each.

    A profile that is not stopped ends after MAX_JOBS jobs of the thread, most of them steps.
    """

    def __init__(self, device: DeviceThread) -> None:
        self._device = device
        self._profiler: Any = None
        self._stop = asyncio.Event()
        self._recording: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Record from now on. Raises InvalidRequest if that is being done."""
        from torch.profiler import profile  # takes 0.1 s

        if self._profiler is not None:
            raise InvalidRequest("A profile is being recorded: stop it first.")
        self._profiler = profile()  # of whatever this machine has
        self._stop.clear()
        await self._device.call(self._profiler.start)  # it records the thread that starts it
        self._recording = asyncio.create_task(self._record(self._profiler), name="profile")

    async def _record(self, profiler: Any) -> None:
        """Stop recording when that is asked for, or there is enough."""
        end = self._device.num_jobs + MAX_JOBS
        while self._device.num_jobs < end and not self._stop.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), POLL_SECONDS)
        await self._device.call(profiler.stop)
        if not self._stop.is_set():
            logger.info("the profile has its %d steps: stop it to have it written", MAX_JOBS)

    async def stop(self, path: Path) -> None:
        """Write what was recorded to a new file, in Chrome's trace format, gzipped if its name ends in .gz.

        Raises InvalidRequest if nothing is being recorded, OSError if the file cannot be written.
        """
        if self._profiler is None or self._recording is None:
            raise InvalidRequest("No profile is being recorded: start one first.")
        profiler, recording = self._profiler, self._recording
        self._profiler = self._recording = None
        self._stop.set()
        await recording
        await asyncio.to_thread(_save, profiler, path)


def _save(profiler: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb"):  # the profiler itself only logs what fails
        pass
    profiler.export_chrome_trace(str(path))
