"""What may restrict the tokens of a continuation by the tokens before them.

A step with such a row launches its forward pass at once; its sampler follows when the masks are there, and
these need the tokens of the step before. So a constraint costs the steps it takes part in a wait, and nobody
else anything.
"""

from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Protocol, Self

import numpy as np

# A mask row is int32 words: bit `t % WORD_BITS` of word `t // WORD_BITS` stands for token t.
WORD_BITS = 32


class Standing(IntEnum):
    """How a continuation stands with a constraint after its newest token: the least of several counts."""

    GOES_ON = auto()
    """More must come: where no token may, the continuation has failed."""
    MAY_END = auto()
    """It is whole as it stands: where no token may follow, it has ended."""
    IS_FREE = auto()
    """It may end, and nothing will be restricted any more."""


class Follower(Protocol):
    """Follows one continuation. Used by one thread at a time, not always the same one."""

    @classmethod
    def restrict(
        cls, followers: Sequence[Self], new_token_ids: Sequence[Sequence[int]], masks: np.ndarray
    ) -> list[Standing]:
        """Take in the tokens that each continuation has gained, and say what may follow.

        masks int32 [len(followers), ceil(vocab_size / 32)]: bit `t % 32` of word `t // 32` is cleared where
        token t may not come next, and otherwise left as it is. Must not raise for what a client has asked:
        a continuation that cannot go on gets an empty mask.
        """

    @property
    def problem(self) -> str:
        """Why nothing can be said about what may follow; empty if the mask says all there is to say."""


class Constraint(Protocol):
    """A frozen value that belongs to a request; safe to hand to any thread."""

    def follow(self) -> Follower:
        """Begin a continuation. Must be quick: what takes time waits for the first restrict()."""


def num_mask_words(vocab_size: int) -> int:
    """Return the number of words of a mask row with a bit for each token."""
    return -(-vocab_size // WORD_BITS)


def pack_mask(bits: np.ndarray) -> np.ndarray:
    """Return a mask row int32 [num_words] from a byte, 0 or 1, per token: uint8 [num_words * WORD_BITS]."""
    return np.packbits(bits, bitorder="little").view("<i4")


def mask_of(token_ids: np.ndarray, num_words: int) -> np.ndarray:
    """Return a mask row int32 [num_words] that allows only `token_ids` int64 [n].

    Ids beyond the mask have no logit and are ignored.
    """
    bits = np.zeros(num_words * WORD_BITS, np.uint8)
    bits[token_ids[token_ids < len(bits)]] = 1
    return pack_mask(bits)
