"""Token healing: lets a prompt that ends inside a word continue as if it had not been cut there.

A text that ends in `http:` is an unlikely beginning of `http://` for a tokenizer with a token `://`. So the
last token of the prompt is removed, and the output must begin with its text.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.constraint import Constraint, MatchState, mask_of
from engine.constraints.grammar import CompiledGrammar
from engine.request import SamplingParams
from engine.text.token_bytes import TokenPieces, is_continuation

# As many tokens as a character has bytes.
MAX_TAKEN_BACK = 4


def num_taken_back(token_ids: Sequence[int], pieces: TokenPieces) -> int:
    """Return how many of a prompt's last tokens to remove.

    One; more if that one begins inside a character; none if the last token is a control token, the last
    character is incomplete, or no token would be left.
    """
    data = b""
    for number in range(1, min(MAX_TAKEN_BACK, len(token_ids) - 1) + 1):
        piece = pieces.piece(token_ids[-number])
        if piece.is_special or not piece.data:
            return 0
        data = piece.data + data
        if not is_continuation(data[0]):
            try:
                data.decode()
            except UnicodeDecodeError:
                return 0
            return number
    return 0


def applies(sampling: SamplingParams) -> bool:
    """Return True if tokens of the prompt were removed."""
    return bool(sampling.healed_token_ids)


def make(sampling: SamplingParams, pieces: TokenPieces, compiled: CompiledGrammar | None) -> Constraint:
    """Return the constraint that makes the output begin with the text of the removed tokens."""
    data = b"".join(pieces.piece(token_id).data for token_id in sampling.healed_token_ids)
    return TokenHealing(data, pieces)


@dataclass(frozen=True)
class TokenHealing:
    """Makes an output begin with `data`, in any split into tokens; the last one may be longer."""

    data: bytes
    pieces: TokenPieces

    def start(self) -> "TokenHealingMatcher":
        """Return a matcher for a new sequence."""
        return TokenHealingMatcher(self)


class TokenHealingMatcher:
    """The bytes that one output must still begin with."""

    problem = ""

    def __init__(self, constraint: TokenHealing) -> None:
        self._rest = constraint.data
        self._pieces = constraint.pieces

    @classmethod
    def fill_masks(
        cls,
        matchers: Sequence["TokenHealingMatcher"],
        new_token_ids: Sequence[Sequence[int]],
        masks: np.ndarray,
    ) -> list[MatchState]:
        """Allow tokens that continue the required bytes; see Matcher."""
        states = []
        for matcher, token_ids, mask in zip(matchers, new_token_ids, masks, strict=True):
            for token_id in token_ids:
                matcher._rest = matcher._rest[len(matcher._pieces.piece(token_id).data) :]
            if matcher._rest:
                mask &= mask_of(matcher._next(), len(mask))
            states.append(MatchState.MUST_CONTINUE if matcher._rest else MatchState.DONE)
        return states

    def _next(self) -> np.ndarray:
        """Return the ids of tokens that begin with the rest, or that the rest begins with: int64 [n]."""
        rest, (data, ids) = self._rest, self._pieces.by_bytes
        # UTF-8 has no byte 0xFF, so this sorts after everything that begins with the rest.
        ranges = [(bisect_left(data, rest), bisect_left(data, rest + b"\xff"))]
        for length in range(1, len(rest)):
            start = rest[:length]
            ranges.append((bisect_left(data, start), bisect_left(data, start + b"\0")))
        return np.concatenate([ids[first:last] for first, last in ranges])
