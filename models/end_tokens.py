"""The tokens that end an output: all that a model's files name."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("monoloop.models")

CONTROL = 3  # a value of tokenizer.ggml.token_type
HEADER = "<|channel|>"  # in templates of gpt-oss, whose turns are several messages
# Tokens that end a turn. Some files declare the end of a document alone as eos.
ENDS_OF_TURN = frozenset(
    (
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|eot|>",
        "<|endofturn|>",
        "<|end_of_turn|>",
        "<end_of_turn>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|return|>",
        "<|call|>",
        "<EOT>",
    )
)


def end_token_ids(origin: Path, vocab_size: Any, *sources: Any) -> tuple[int, ...]:
    """Return every id once, in order of appearance; a source is an id, a list of them, or None.

    What is not an id of the vocabulary (-1 means none in some files) is left out, with a warning.
    """
    limit = vocab_size if isinstance(vocab_size, int) else 2**31
    ids: dict[int, None] = {}
    for value in _values(sources):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and 0 <= value < limit and value == int(value):
            ids[int(value)] = None
        else:
            logger.warning("%s: %r is not the id of a token, and ends no output", origin, value)
    return tuple(ids)


def ends_of_turn(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids of control tokens that end a turn in a GGUF file's chat template."""
    template = str(metadata.get("tokenizer.chat_template", ""))
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    kinds = metadata.get("tokenizer.ggml.token_type") or ()
    ends = ENDS_OF_TURN - {"<|end|>"} if HEADER in template else ENDS_OF_TURN
    return [
        token_id
        for token_id, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == CONTROL and text in ends and text in template
    ]


def _values(source: Any) -> Iterator[Any]:
    if isinstance(source, list | tuple):
        for item in source:
            yield from _values(item)
    elif source is not None:
        yield source
