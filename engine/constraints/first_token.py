"""Restricts the first token of an output to a set (`first_token_ids`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.constraint import Constraint, MatchState, mask_of
from engine.constraints.grammar import CompiledGrammar
from engine.request import SamplingParams
from engine.text.token_bytes import TokenPieces


def applies(sampling: SamplingParams) -> bool:
    """Return True if the first token is restricted."""
    return bool(sampling.first_token_ids)


def make(sampling: SamplingParams, pieces: TokenPieces, compiled: CompiledGrammar | None) -> Constraint:
    """Return the constraint of `first_token_ids`."""
    return FirstToken(sampling.first_token_ids)


@dataclass(frozen=True)
class FirstToken:
    """Allows only `token_ids` as the first token, and every token after it."""

    token_ids: frozenset[int]

    @cached_property
    def ids(self) -> np.ndarray:
        """The ids as an array, int64 [n], made once for all requests that share this constraint."""
        return np.fromiter(self.token_ids, np.int64, len(self.token_ids))

    def start(self) -> "FirstTokenMatcher":
        """Return a matcher for a new sequence."""
        return FirstTokenMatcher(self.ids)


class FirstTokenMatcher:
    """Remembers if an output has a token."""

    problem = ""

    def __init__(self, token_ids: np.ndarray) -> None:
        self._token_ids = token_ids
        self._has_begun = False

    @classmethod
    def fill_masks(
        cls,
        matchers: Sequence["FirstTokenMatcher"],
        new_token_ids: Sequence[Sequence[int]],
        masks: np.ndarray,
    ) -> list[MatchState]:
        """Allow only the given ids in rows that have no token yet; see Matcher."""
        states = []
        for matcher, token_ids, mask in zip(matchers, new_token_ids, masks, strict=True):
            matcher._has_begun |= bool(token_ids)
            if not matcher._has_begun:
                mask &= mask_of(matcher._token_ids, len(mask))
            states.append(MatchState.DONE if matcher._has_begun else MatchState.MUST_CONTINUE)
        return states
