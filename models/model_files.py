"""ModelFiles: the files of a model on this machine, found by the catalog and read by the loader."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class ModelFiles:
    """Paths of a model, and its defaults for ending and sampling.

    `name` is its name in the API; `weights` a folder with safetensors, or a .gguf file, of several
    that are one model the first;
    `AutoTokenizer.from_pretrained(tokenizer_dir)` works without a network. `generation_defaults` has the
    sampling parameters of generation_config.json, else of the catalog, under their names there.
    `pooling` and `matryoshka` are those of an embedding model, see `models.sentence_transformer`.
    """

    name: str
    weights: Path
    format: Literal["safetensors", "gguf"]
    tokenizer_dir: Path
    generation_defaults: dict[str, Any]
    eos_token_ids: tuple[int, ...]
    pooling: str | None = None
    matryoshka: bool | tuple[int, ...] = False
