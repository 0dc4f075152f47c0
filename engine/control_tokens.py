"""Marks the text of control tokens, so that text which only spells one is never taken for it.

The detokenizer puts a noncharacter, which no text contains, before the text of each token in
SamplingParams.marks, and removes it from all other text. The server's parsers look for marked texts, and
strip the marks they have no use for. No other module handles the noncharacter.
"""

import re

MARK = "\ufdd0"


class OwnText(str):
    """Text that the server writes into a message: control tokens in it are encoded as such."""


class TextParts(tuple[str, ...]):
    """The text of a message in parts; a chat template gets them joined."""


def mark(text: str) -> str:
    """Return the text of a control token, marked."""
    return MARK + text


def is_marked(text: str) -> bool:
    """Return True if a control token begins `text`."""
    return text.startswith(MARK)


def strip(text: str) -> str:
    """Return `text` without marks."""
    return text.replace(MARK, "")


def until(chars: str) -> re.Pattern[str]:
    """Return a pattern of text, maybe empty, up to a control token or one of `chars`, a character class."""
    return re.compile(f"[^{chars}{MARK}]*")
