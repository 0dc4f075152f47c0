"""Finds the control tokens of a tokenizer for filling in the middle of a text."""

from typing import Any, NamedTuple

# Prefix, suffix, middle, as each family spells them. The text before the gap always comes first.
FORMATS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)


class InfillTokens(NamedTuple):
    """The ids of the tokens before the prefix, before the suffix, and before the answer."""

    prefix: int
    suffix: int
    middle: int

    @classmethod
    def of(cls, backend: Any) -> "InfillTokens | None":
        """Return those of a `tokenizers.Tokenizer`, None if it has none."""
        for texts in FORMATS:
            ids = [backend.token_to_id(text) for text in texts]
            if None not in ids:
                return cls(*ids)
        return None

    def prompt(self, start: list[int], before: list[int], after: list[int]) -> list[int]:
        """Return the prompt whose continuation belongs between two texts; `start` begins every text (BOS)."""
        return [*start, self.prefix, *before, self.suffix, *after, self.middle]
