"""Floor 3: requests, sequences, steps, pages, sampling, tokenizers. These are its public names."""

import os
from pathlib import Path

# Read when torch's OpenMP runtime is loaded. By default its threads spin for milliseconds at the end of every
# parallel region, and whoever else wants a core (the event loop, another program) stalls all of them: beside
# two busy processes on two cores, decoding at batch 16 was five times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from engine.engine import Engine, ModelInfo
from engine.stream import RequestStream


async def pull(name: str, cache_dir: Path | None = None) -> str:
    """Fetch a model without loading it; returns where its weights lie. Raises ModelError."""
    from engine.startup import locate  # torch takes seconds to import

    return str((await locate(name, cache_dir)).weights)


__all__ = ["Engine", "ModelInfo", "RequestStream", "pull"]
