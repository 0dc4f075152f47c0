"""Keeps words out of an output (`bad_words`): the last token of a word may not follow its other tokens."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.constraint import WORD_BITS, Constraint, MatchState
from engine.constraints.grammar import CompiledGrammar
from engine.request import SamplingParams
from engine.text.token_bytes import TokenPieces


async def spellings(
    words: Sequence[str], encode_batch: Callable[[list[str]], Awaitable[list[list[int]]]]
) -> list[tuple[int, ...]]:
    """Return the token ids of each word at the start of a text, and after a space where they differ.

    Other ways to split a word into tokens are not found: spellings are banned, not texts.
    """
    found: dict[tuple[int, ...], None] = {}
    ids = await encode_batch([space + word.lstrip() for word in words for space in ("", " ")])
    for first, spaced in zip(map(tuple, ids[::2]), map(tuple, ids[1::2]), strict=True):
        found[first] = None
        if spaced[len(spaced) - len(first) :] != first:
            found[spaced] = None
    return [ids for ids in found if ids]


def applies(sampling: SamplingParams) -> bool:
    """Return True if there are words of several tokens; those of one are masked once by the state slot."""
    return any(len(ids) > 1 for ids in sampling.bad_words_ids)


def make(sampling: SamplingParams, pieces: TokenPieces, compiled: CompiledGrammar | None) -> Constraint:
    """Return the constraint of the words of several tokens."""
    return BadWords(tuple(ids for ids in sampling.bad_words_ids if len(ids) > 1))


@dataclass(frozen=True)
class BadWords:
    """Bans words, given as token ids, of at least two tokens each."""

    words: tuple[tuple[int, ...], ...]

    def start(self) -> "BadWordsMatcher":
        """Return a matcher for a new sequence."""
        return BadWordsMatcher(self.words)


class BadWordsMatcher:
    """The last tokens of one output, one fewer than the longest word has."""

    problem = ""

    def __init__(self, words: tuple[tuple[int, ...], ...]) -> None:
        self._words = words
        self._length = max(map(len, words)) - 1
        self._tail: tuple[int, ...] = ()

    @classmethod
    def fill_masks(
        cls,
        matchers: Sequence["BadWordsMatcher"],
        new_token_ids: Sequence[Sequence[int]],
        masks: np.ndarray,
    ) -> list[MatchState]:
        """Clear the last token of every word whose other tokens the output ends with; see Matcher."""
        for matcher, token_ids, mask in zip(matchers, new_token_ids, masks, strict=True):
            for token_id in matcher._banned_after(token_ids):
                mask[token_id // WORD_BITS] &= ~np.array(1 << token_id % WORD_BITS, np.uint32).view(np.int32)
        return [MatchState.MAY_STOP] * len(matchers)

    def _banned_after(self, token_ids: Sequence[int]) -> list[int]:
        self._tail = (*self._tail, *token_ids)[-self._length :]
        return [word[-1] for word in self._words if self._tail[1 - len(word) :] == word[:-1]]
