"""The engine: requests, sequences, steps, pages, sampling, tokenizers. These are its public names."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

# Read when torch's OpenMP runtime is loaded: its threads sleep at the end of every parallel region. Spinning
# is faster on an idle machine, but stalls when any other work (the event loop, another program) takes a core
# from the thread that all others wait for. Two cores, SmolLM2-135M in bfloat16 over HTTP, output tokens/s,
# alone and beside a busy loop on one core, by GOMP_SPINCOUNT; the threads of kernels.cpu do neither.
#
#     streams      sleep        2,000        4,000       16,000     one thread
#        1       42    54     65    26     69    19     68     8     63    61
#       16      378   372    568   224    612   159    565    74    436   413
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from engine.beam import search_beams
from engine.config import EngineConfig
from engine.engine import Engine, open_listeners
from engine.model_info import ModelInfo
from engine.request import Request, SamplingParams
from engine.stream import RequestStream
from engine.text.tokenizer_pool import TokenizerPool

if TYPE_CHECKING:
    from engine.machine_check import Finding
    from engine.model_check import ModelCheck
    from engine.record.replay import Replayed
    from models.cache import CachedModel
    from models.features import Supported


async def pull(name: str, cache_dir: Path | None = None) -> str:
    """Download a model without loading it; return the path of its weights. Raises ModelError."""
    from engine.startup import locate  # torch takes seconds to import

    return str((await locate(name, cache_dir)).weights)


def cached_models(cache_dir: Path | None = None) -> "list[CachedModel]":
    """Return the models that were fetched, with folder and size."""
    from models.cache import cached_models

    return cached_models(cache_dir)


def remove_model(name: str, cache_dir: Path | None = None) -> "CachedModel | None":
    """Delete a fetched model's files and return what it was; None if it is not there. Raises OSError."""
    from models.cache import remove

    return remove(name, cache_dir)


def supported_models() -> "Supported":
    """Return the architectures and weight formats that can be loaded."""
    from models.features import supported

    return supported()


def check_model(config: EngineConfig) -> "ModelCheck":
    """Check that the model of the settings runs on this machine, without loading it; blocks.

    Raises ModelError or ValueError with the reason if it does not.
    """
    from engine.model_check import check_model

    return check_model(config)


def check_machine(config: EngineConfig) -> "list[Finding]":
    """Check what the engine needs of this machine, apart from the model; blocks for seconds. Never raises."""
    from engine.machine_check import check_machine

    return list(check_machine(config))


def check_listeners(config: EngineConfig) -> None:
    """Open and close what the settings have the engine write or send, such as a record.

    Raises ValueError with the setting and the reason if one cannot be opened.
    """
    for listener in open_listeners(config):
        listener.discard()


def replay(
    path: Path,
    *,
    model: str | None = None,
    device: str | None = None,
    cache_dir: Path | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> "Replayed":
    """Run the steps of a record again and compare the tokens; blocks. `model`: its path on this machine.

    Raises ValueError for a file that is no record, or for a record of another model, and ModelError.
    """
    from engine.record.replay import replay

    return replay(path, model=model, device=device, cache_dir=cache_dir, on_progress=on_progress)


def write_timeline(path: Path, target: Path) -> str | None:
    """Convert a record to Chrome's trace format; return why the record ends, if it was not closed.

    Raises ValueError for a file that is no record, and for a target that cannot be written.
    """
    from engine.record.timeline import write_timeline

    return write_timeline(path, target)


__all__ = [
    "Engine",
    "EngineConfig",
    "ModelInfo",
    "Request",
    "RequestStream",
    "SamplingParams",
    "TokenizerPool",
    "cached_models",
    "check_listeners",
    "check_machine",
    "check_model",
    "pull",
    "remove_model",
    "replay",
    "search_beams",
    "supported_models",
    "write_timeline",
]
