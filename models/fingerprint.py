"""A hash that identifies a model's weights, computed in milliseconds."""

import hashlib
from pathlib import Path

from models.gguf.parts import part_paths
from models.model_files import ModelFiles
from models.weight_files import weight_files

NUM_PIECES = 16
PIECE_BYTES = 65_536


def fingerprint(files: ModelFiles) -> str:
    """Return a hash of the configuration, and of size, head and evenly spread pieces of each file of weights.

    Fine-tuning changes all weights a little, so pieces are enough. Names and paths of files do not count.
    """
    digest = hashlib.sha256()
    if files.format == "safetensors":
        paths = weight_files(files.weights)
        digest.update((files.weights / "config.json").read_bytes())
    else:
        paths = part_paths(files.weights)
    for path in paths:
        _add(path, digest)
    return digest.hexdigest()[:32]


def _add(path: Path, digest: "hashlib._Hash") -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        for index in range(NUM_PIECES):
            file.seek(index * max(0, size - PIECE_BYTES) // (NUM_PIECES - 1))
            digest.update(file.read(PIECE_BYTES))
