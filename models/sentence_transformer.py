"""What a checkpoint folder says about embeddings: how to pool, and to which sizes a vector may be cut."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.errors import ModelError
from models.json_files import read_json, read_json_list

# Normalize scales vectors to length 1, which is done to all.
_HANDLED = ("Transformer", "Pooling", "Normalize")
_MODE = "pooling_mode_"
_POOLINGS = {"mean": "mean", "mean_tokens": "mean", "lasttoken": "last"}


def declared_pooling(folder: Path) -> str | None:
    """Return the pooling of a sentence-transformers model, None for any other checkpoint.

    That is `mean` or `last`, or else the folder's own name of what it needs. Raises ModelError for files that
    cannot be read.
    """
    if not (folder / "modules.json").is_file():
        return None
    kinds = {}
    for module in read_json_list(folder / "modules.json"):
        kinds[str(module.get("type", "")).rpartition(".")[2]] = str(module.get("path", ""))
    for kind in kinds:
        if kind not in _HANDLED:
            return f"a module {kind}"
    if "Pooling" not in kinds:
        return "no module Pooling"
    config = read_json(folder / kinds["Pooling"] / "config.json")
    modes = [
        name.removeprefix(_MODE) for name, value in config.items() if name.startswith(_MODE) and value is True
    ]
    if isinstance(mode := config.get("pooling_mode"), str):  # as newer versions write it
        modes = [mode]
    return _POOLINGS.get(modes[0], modes[0]) if len(modes) == 1 else " and ".join(modes) or "no pooling"


def matryoshka_sizes(config: Mapping[str, Any]) -> bool | tuple[int, ...]:
    """Return the sizes that config.json lets vectors be cut to: some, any (True), or none (False).

    Raises ModelError for what is no list of sizes.
    """
    if sizes := config.get("matryoshka_dimensions"):
        try:
            return tuple(int(size) for size in sizes)
        except (TypeError, ValueError):
            raise ModelError(
                f"the matryoshka_dimensions of config.json are no sizes: {sizes!r:.99}"
            ) from None
    return bool(config.get("is_matryoshka"))
