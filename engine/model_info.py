"""Facts about the served model that are fixed once it is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ModelInfo:
    """The served model. `vocab_size` is the width of the logits: valid token ids are below it.

    `kv_windows`: for each KV group the tokens that a query sees, its own included; 0: all of them.
    With `has_states` its layers keep more than pages for a sequence, which must be computed from the start.
    Sequences of more than `short_context` tokens have other keys than shorter ones (LongRoPE); None: all have
    the same. With `num_labels` above 0 it has a score head of that many outputs and no language model head.
    `pooling` computes embeddings; `is_embedding_model` if its files say how. `matryoshka` are the sizes that
    its vectors may be cut to: some, any (True), or none (False).
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
    short_context: int | None = None
    quantization: str | None = None
    kv_dtype: str = "auto"
    num_labels: int = 0
    pooling: Literal["mean", "last"] = "mean"
    is_embedding_model: bool = False
    matryoshka: bool | tuple[int, ...] = False

    @property
    def embedding_sizes(self) -> Sequence[int]:
        """Return the sizes that an embedding may have."""
        if self.matryoshka is True:
            return range(1, self.hidden_size + 1)
        sizes = {self.hidden_size, *(self.matryoshka or ())}
        return tuple(sorted(size for size in sizes if 0 < size <= self.hidden_size))
