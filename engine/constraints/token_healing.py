"""Token healing: a prompt that was cut inside a word goes on as if it had not been.

A text that ends in `http:` is no likely beginning of `http://` where the tokenizer has a token `://`. So the
last token of the prompt is taken back, and the output must begin with its text.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.constraint import Standing, mask_of
from engine.request import SamplingParams
from engine.text.token_bytes import TokenPieces
from engine.text.token_log import is_continuation

# As many tokens as a character has bytes.
MAX_TAKEN_BACK = 4


def num_taken_back(token_ids: Sequence[int], pieces: TokenPieces) -> int:
    """How many of the last tokens of a prompt are to be healed.

    One; more where that begins inside a character; none where there is nothing to heal: a control token, a
    character that is not whole, a prompt of which nothing would be left.
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


@dataclass(frozen=True)
class Healing:
    """The constraint of an output that begins with `data`, which its prompt has shown already."""

    data: bytes
    pieces: TokenPieces

    @classmethod
    def of(cls, sampling: SamplingParams, pieces: TokenPieces) -> "tuple[Healing, ...]":
        """The constraint of what was taken back, if anything was."""
        data = b"".join(pieces.piece(token_id).data for token_id in sampling.healed_token_ids)
        return (cls(data, pieces),) if data else ()

    def follow(self) -> "HealingFollower":
        """Begin a continuation."""
        return HealingFollower(self)


class HealingFollower:
    """The bytes that one output must still spell."""

    problem = ""

    def __init__(self, constraint: Healing) -> None:
        self._rest = constraint.data
        self._pieces = constraint.pieces

    @classmethod
    def restrict(
        cls,
        followers: Sequence["HealingFollower"],
        new_token_ids: Sequence[Sequence[int]],
        masks: np.ndarray,
    ) -> list[Standing]:
        """As Follower says."""
        standings = []
        for follower, token_ids, mask in zip(followers, new_token_ids, masks, strict=True):
            for token_id in token_ids:
                follower._rest = follower._rest[len(follower._pieces.piece(token_id).data) :]
            if follower._rest:
                mask &= mask_of(follower._next(), len(mask))
            standings.append(Standing.GOES_ON if follower._rest else Standing.IS_FREE)
        return standings

    def _next(self) -> np.ndarray:
        """Ids of the tokens that begin with the rest, and of those the rest begins with: int64 [n]."""
        rest, (data, ids) = self._rest, self._pieces.by_bytes
        # UTF-8 has no byte 0xFF, so this is behind everything that begins with the rest.
        ranges = [(bisect_left(data, rest), bisect_left(data, rest + b"\xff"))]
        for length in range(1, len(rest)):
            start = rest[:length]
            ranges.append((bisect_left(data, start), bisect_left(data, start + b"\0")))
        return np.concatenate([ids[first:last] for first, last in ranges])
