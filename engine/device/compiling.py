"""Compiles a model's CPU kernels in another process, since a compiler keeps 190 to 350 MB when it is done.

That is more than the weights of the default model. Compiled code stays on disk (kernels/cpu/code_cache.py),
so that this happens once for the kernels of a model's formats, and again for those of another version.
"""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from engine.config import EngineConfig
from engine.machine import trim_heap
from kernels.cpu import compiler
from kernels.cpu.not_kept import NotKept, without_compiling

logger = logging.getLogger("monoloop.engine")

PROGRAM = f"import sys; sys.path[:] = sys.argv[1:]; from {__name__} import main; main()"
MAX_SECONDS = 600.0
ABANDONED = 3  # exit code of the process whose parent has ended
T = TypeVar("T")


def with_kept_kernels(make: Callable[[], T], config: EngineConfig, token_budget: int) -> T:
    """Return the result of `make`, which loads a model and calls its kernels.

    If some are not compiled, the model is given up while another process does that, so that there are never
    two in memory. What that process did not compile, for whatever reason, is compiled here.
    """
    if compiler.can_keep():
        with suppress(NotKept), without_compiling():
            return make()
        trim_heap()
        compile_apart(config, token_budget)
    return make()


def compile_apart(config: EngineConfig, token_budget: int) -> None:
    """Load a model in another process, which compiles its kernels; wait until it ends. Logs if it fails."""
    logger.info("compiling the CPU kernels for this model, once: about 20 s on a laptop")
    start = time.perf_counter()
    settings = config.model_copy(update={"token_budget": token_budget}).model_dump_json()
    try:
        code = _run(settings)
    except OSError as error:
        logger.warning("no process compiles CPU kernels (%s); they are compiled here", error)
        return
    seconds = time.perf_counter() - start
    if code:
        logger.warning("the process that compiles CPU kernels ended with %d; they are compiled here", code)
    else:
        logger.info("compiled the CPU kernels in %.1f s", seconds)


def _run(settings: str) -> int:
    """Run `main` in another process; return its exit code. Raises OSError if it cannot be started."""
    # Isolated, and with the path of this process: `-m` would import what lies in the current directory.
    command = [sys.executable, "-I", "-c", PROGRAM, *sys.path]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, text=True) as process:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(f"{settings}\n")
            process.stdin.flush()
        try:
            code = process.wait(MAX_SECONDS)  # the pipe stays open: the other process ends with this one
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        with suppress(BrokenPipeError):
            process.stdin.close()
    return code


def main() -> None:
    """Load the model of the settings on standard input, and end; also when standard input ends."""
    from engine.device.runner import ModelRunner
    from models import catalog

    config = EngineConfig.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    files = catalog.locate(config.model, config.cache_dir)
    assert config.token_budget is not None
    ModelRunner.load(config, files, config.token_budget, compiles_apart=False)
    os._exit(0)  # at once: nothing is left to write


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(ABANDONED)
