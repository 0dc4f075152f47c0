"""What the catalog finds and the loader reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class ModelFiles:
    """Where a model lies, and what its configuration says about ending and sampling.

    `name` is what clients call it; `weights` a folder with safetensors, or a .gguf file;
    `AutoTokenizer.from_pretrained(tokenizer_dir)` works without a network. `generation_defaults` has the
    sampling parameters of generation_config.json under their names there.
    """

    name: str
    weights: Path
    format: Literal["safetensors", "gguf"]
    tokenizer_dir: Path
    generation_defaults: dict[str, Any]
    eos_token_ids: tuple[int, ...]
