"""Facts about the served model that are fixed once it is loaded."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelInfo:
    """The served model. `vocab_size` is the width of the logits: valid token ids are below it.

    `kv_windows`: for each KV group the tokens that a query sees, its own included; 0: all of them.
    With `has_states` its layers keep more than pages for a sequence, which must be computed from the start.
    With `num_labels` above 0 it has a score head of that many outputs and no language model head.
    """

    name: str
    max_model_len: int
    vocab_size: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, Any]
    dtype: str
    device: str
    num_pages: int
    page_size: int
    created: int
    kv_windows: tuple[int, ...] = (0,)
    has_states: bool = False
    quantization: str | None = None
    num_labels: int = 0
