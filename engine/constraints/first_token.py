"""Tokens that an output may begin with."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.constraint import Standing, mask_of
from engine.request import SamplingParams


@dataclass(frozen=True)
class FirstToken:
    """The constraint that binds the first token of an output, and no other."""

    token_ids: frozenset[int]

    @classmethod
    def of(cls, sampling: SamplingParams) -> "tuple[FirstToken, ...]":
        """The constraint that sampling parameters ask for, if any."""
        return (cls(sampling.first_token_ids),) if sampling.first_token_ids else ()

    @cached_property
    def ids(self) -> np.ndarray:
        """The same, int64 [n]: once for all that begin with them."""
        return np.fromiter(self.token_ids, np.int64, len(self.token_ids))

    def follow(self) -> "FirstTokenFollower":
        """Begin a continuation."""
        return FirstTokenFollower(self.ids)


class FirstTokenFollower:
    """Whether one output has begun."""

    problem = ""

    def __init__(self, token_ids: np.ndarray) -> None:
        self._token_ids = token_ids
        self._has_begun = False

    @classmethod
    def restrict(
        cls,
        followers: Sequence["FirstTokenFollower"],
        new_token_ids: Sequence[Sequence[int]],
        masks: np.ndarray,
    ) -> list[Standing]:
        """As Follower says."""
        standings = []
        for follower, token_ids, mask in zip(followers, new_token_ids, masks, strict=True):
            follower._has_begun |= bool(token_ids)
            if not follower._has_begun:
                mask &= mask_of(follower._token_ids, len(mask))
            standings.append(Standing.IS_FREE if follower._has_begun else Standing.GOES_ON)
        return standings
