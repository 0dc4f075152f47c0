"""Words that must not appear: the last token of one may not follow the others."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.constraint import WORD_BITS, Standing
from engine.request import SamplingParams


async def spellings(
    words: Sequence[str], encode_batch: Callable[[list[str]], Awaitable[list[list[int]]]]
) -> list[tuple[int, ...]]:
    """Token ids of each word as it begins a text, and after a space if that spells it in another way.

    Other ways to cut a word into tokens are not found: what is banned is a spelling.
    """
    found: dict[tuple[int, ...], None] = {}
    ids = await encode_batch([space + word.lstrip() for word in words for space in ("", " ")])
    for first, spaced in zip(map(tuple, ids[::2]), map(tuple, ids[1::2]), strict=True):
        found[first] = None
        if spaced[len(spaced) - len(first) :] != first:
            found[spaced] = None
    return [ids for ids in found if ids]


@dataclass(frozen=True)
class BadWords:
    """The constraint of words that are several tokens each; those of one are masked once and for all."""

    words: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, sampling: SamplingParams) -> "tuple[BadWords, ...]":
        """The constraint that sampling parameters ask for, if any."""
        words = tuple(ids for ids in sampling.bad_words_ids if len(ids) > 1)
        return (cls(words),) if words else ()

    def follow(self) -> "BadWordsFollower":
        """Begin a continuation."""
        return BadWordsFollower(self.words)


class BadWordsFollower:
    """The end of one output, as long as the longest word without its last token."""

    problem = ""

    def __init__(self, words: tuple[tuple[int, ...], ...]) -> None:
        self._words = words
        self._length = max(map(len, words)) - 1
        self._tail: tuple[int, ...] = ()

    @classmethod
    def restrict(
        cls,
        followers: Sequence["BadWordsFollower"],
        new_token_ids: Sequence[Sequence[int]],
        masks: np.ndarray,
    ) -> list[Standing]:
        """Clear the last token of every word whose others have just come; see `Follower`."""
        for follower, token_ids, mask in zip(followers, new_token_ids, masks, strict=True):
            for token_id in follower._banned_after(token_ids):
                mask[token_id // WORD_BITS] &= ~np.array(1 << token_id % WORD_BITS, np.uint32).view(np.int32)
        return [Standing.MAY_END] * len(followers)

    def _banned_after(self, token_ids: Sequence[int]) -> list[int]:
        self._tail = (*self._tail, *token_ids)[-self._length :]
        return [word[-1] for word in self._words if self._tail[1 - len(word) :] == word[:-1]]
