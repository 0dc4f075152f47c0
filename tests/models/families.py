"""A tiny model of each family, made by transformers from random weights, for what must hold of all families.

To add a family, add an entry to FAMILIES, in alphabetical order: the architecture that its config.json names,
and the keys of its configuration, those of BASE unless the family differs. The tests of all families then
run for it. Sizes are odd on purpose: three query heads share a key/value head, head_dim is not hidden_size /
num_heads, the vocabulary is no multiple of 64, windows are shorter than the prompts. Have as many layers as
the family's pattern needs (a full layer and one with a window; a dense one and one with experts), mostly two.

If transformers has no class of that name, give a function `make`. It is called with the keys of the
configuration and returns a module like those of transformers: `module(ids)` has `logits`, and
`save_pretrained(folder)` writes config.json, and the tensors with the names and shapes of the published
checkpoints. Often that is a class of a similar family with another `save_pretrained`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class TinyFamily:
    """How to make a tiny model. `tolerance` bounds errors of float32 logits, relative to the largest one."""

    architecture: str
    config: dict[str, Any]
    make: Callable[..., Any] | None = None
    # Two float32 models that differ only in the order of their sums are about 1e-6 apart.
    tolerance: float = 2e-5


FAMILIES = {
    "llama": TinyFamily("LlamaForCausalLM", BASE),
    "mistral": TinyFamily("MistralForCausalLM", {**BASE, "sliding_window": 19}),
    "qwen2": TinyFamily("Qwen2ForCausalLM", BASE),
    "qwen2 with windows": TinyFamily(
        "Qwen2ForCausalLM", {**BASE, "use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1}
    ),
    "qwen3": TinyFamily("Qwen3ForCausalLM", BASE),
}


def make(name: str, architecture: str | None = None, **changes: Any) -> Any:
    """Return a family's model with random weights.

    `architecture` names another class of transformers for it, such as one with a score head; `changes` are
    made to its configuration.
    """
    family = FAMILIES[name]
    config = {**family.config, **changes}
    if family.make is not None and architecture is None:
        return randomised(family.make(**config))
    # Found by name: importing the classes of all families takes seconds.
    model_class = getattr(transformers, architecture or family.architecture)
    made = model_class.config_class(**config)
    made._attn_implementation = "eager"  # the others leave a sliding window out
    return randomised(model_class(made))


def randomised(model: Any) -> Any:
    """Return a model with random weights. Biases and norms start at 0 and 1, which would hide unused ones."""
    torch.manual_seed(0)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn_like(tensor) * 0.2 + (tensor.mean() > 0.5))
    return model.eval()


def prompt(length: int, seed: int = 1, vocab_size: int = BASE["vocab_size"]) -> list[int]:
    """Return random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()
