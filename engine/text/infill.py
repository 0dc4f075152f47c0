"""Filling in the middle: which of a tokenizer's control tokens stand around what is before and behind."""

from typing import Any, NamedTuple

# Prefix, suffix, middle, as each family writes them. What is before the hole always comes first.
FORMATS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)


class InfillTokens(NamedTuple):
    """The ids that stand in front of the prefix, in front of the suffix, and in front of the answer."""

    prefix: int
    suffix: int
    middle: int

    @classmethod
    def of(cls, backend: Any) -> "InfillTokens | None":
        """Those of a `tokenizers.Tokenizer`, None if it has none."""
        for texts in FORMATS:
            ids = [backend.token_to_id(text) for text in texts]
            if None not in ids:
                return cls(*ids)
        return None

    def prompt(self, start: list[int], before: list[int], behind: list[int]) -> list[int]:
        """The prompt whose continuation belongs between two texts; `start` is how every text begins (BOS)."""
        return [*start, self.prefix, *before, self.suffix, *behind, self.middle]
