"""`monoloop` with the real engine around the toy model; prompts that begin with FAULTY have a fault."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from engine.errors import DeviceLost
from engine.outputs import StepPlan
from server import cli, lifecycle
from server.settings import Settings
from server.terminal import print_status
from tests.engine.toy_engine import CHARS, toy_engine

FAULTY = 66


def hang() -> None:
    """Never return."""
    print_status("hanging")
    threading.Event().wait()


def raise_error() -> None:
    """Fail as a kernel does that has a bug."""
    raise RuntimeError("broken on purpose")


def lose_device() -> None:
    """Fail as every step does after a fault of the GPU."""
    raise DeviceLost("The device has failed: an illegal memory access was encountered")


def end_thread() -> None:
    """End the device thread after this step."""
    engines[0]._device._jobs.put(None)


# By the environment variable FAULT.
FAULTS: dict[str, Callable[[], None]] = {
    "hang": hang,
    "raise": raise_error,
    "lose": lose_device,
    "end": end_thread,
    "": lambda: None,
}
engines: list[Any] = []


def before_step(plan: StepPlan) -> None:
    """Take long enough that requests overlap; then have the fault if it is its turn."""
    time.sleep(0.005)
    if any(init.prompt_token_ids[0] == FAULTY for init in plan.inits.values()):
        FAULTS[os.environ.get("FAULT", "")]()


async def start_toy_engine(settings: Settings, metrics: Any, on_progress: Callable[[str], None]) -> Any:
    """Return an engine that runs until the end of the process."""
    on_progress("found toy")
    running = toy_engine(
        num_pages=8192,
        before_step=before_step,
        observer=metrics,
        watchdog_timeout_seconds=settings.engine.watchdog_timeout_seconds,
    )
    engine = await running.__aenter__()
    engine.tokenizer._tokenizer.encode_batch = lambda texts, **_: [[CHARS.index(c) for c in t] for t in texts]
    engines[:] = [engine, running]
    return engine


if __name__ == "__main__":
    lifecycle.start_engine = start_toy_engine
    sys.exit(cli.main())
