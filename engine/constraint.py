"""What may restrict the tokens of a continuation by the tokens before them.

A step with such a row launches its forward pass at once; its sampler follows when the masks are there, and
these need the tokens of the step before. So a constraint costs the steps it takes part in a wait, and nobody
else anything.
"""

from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Protocol, Self

import numpy as np


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
