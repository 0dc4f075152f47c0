"""Floor 3: requests, sequences, steps, pages, sampling, tokenizers. These are its public names."""

from pathlib import Path

from engine.engine import Engine, ModelInfo
from engine.stream import RequestStream


async def pull(name: str, cache_dir: Path | None = None) -> str:
    """Fetch a model without loading it; returns where its weights lie. Raises ModelError."""
    from engine.startup import locate  # torch takes seconds to import

    return str((await locate(name, cache_dir)).weights)


__all__ = ["Engine", "ModelInfo", "RequestStream", "pull"]
