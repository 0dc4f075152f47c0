"""The protocol of constraints, which restrict the next token of a sequence by the tokens before it.

A step with a constrained row launches its forward pass at once, and its sampler once the masks are there;
these need the tokens of the step before. So a constraint makes the steps it takes part in wait, and costs
other steps nothing.
"""

from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Protocol, Self

import numpy as np

# A mask row is int32 words: bit `t % WORD_BITS` of word `t // WORD_BITS` is set if token t is allowed.
WORD_BITS = 32


class MatchState(IntEnum):
    """How far a sequence satisfies a constraint after its newest token. Of several, the least counts."""

    MUST_CONTINUE = auto()
    """More tokens are required: if none is allowed, the request fails."""
    MAY_STOP = auto()
    """The output is complete as it is: if no token is allowed, it has ended."""
    DONE = auto()
    """The output is complete, and the constraint restricts nothing any more."""


class Matcher(Protocol):
    """The state of one constraint for one sequence. Used by one thread at a time, not always the same one."""

    @classmethod
    def fill_masks(
        cls, matchers: Sequence[Self], new_token_ids: Sequence[Sequence[int]], masks: np.ndarray
    ) -> list[MatchState]:
        """Consume the new tokens of each sequence and clear the bits of tokens that must not come next.

        masks int32 [len(matchers), num_words]; other bits stay as they are. Must not raise for what a client
        asked for: a sequence that cannot continue gets an empty mask.
        """

    @property
    def problem(self) -> str:
        """Why the allowed tokens are unknown; empty if the mask is right."""


class Constraint(Protocol):
    """A frozen value that belongs to a request and may be used from any thread."""

    def start(self) -> Matcher:
        """Return a matcher for a new sequence. Must be quick: slow work belongs in fill_masks()."""


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
