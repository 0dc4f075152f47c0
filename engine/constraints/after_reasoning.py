"""A grammar that binds only the answer behind a model's reasoning."""

from collections.abc import Sequence
from enum import Enum, auto

import numpy as np

from engine.constraint import WORD_BITS, Constraint, Standing
from engine.constraints.grammar import CompiledGrammar, GrammarFollower
from engine.outputs import MARK
from engine.request import SamplingParams


class _State(Enum):
    UNDECIDED = auto()  # nothing written yet: reasoning may begin, or the answer
    THINKING = auto()
    ANSWERING = auto()


def bind(grammar: CompiledGrammar, sampling: SamplingParams) -> Constraint:
    """The constraint of a request: its grammar, behind its reasoning if there may be any."""
    if sampling.reasoning is None:
        return grammar
    ids = {MARK + text: token_id for token_id, text in sampling.marks}
    span = sampling.reasoning
    return AfterReasoning(grammar, ids.get(span.open), ids.get(span.close), span.close, span.is_open)


class AfterReasoning:
    """Lets a model think as it likes first.

    `opener` and `closer` are the ids of the markers, None for one that is written in several tokens: such a
    closer is looked for in the text, and reasoning with such an opener can only be begun by the prompt.
    """

    def __init__(
        self, grammar: CompiledGrammar, opener: int | None, closer: int | None, close: str, is_open: bool
    ) -> None:
        self.grammar = grammar
        self.opener = opener
        self.closer = closer
        self.close = close.removeprefix(MARK).encode()
        self.is_open = is_open

    def follow(self) -> "AfterReasoningFollower":
        """Begin a continuation."""
        return AfterReasoningFollower(self)


class AfterReasoningFollower:
    """Where one continuation stands: before, in, or behind its reasoning."""

    def __init__(self, constraint: AfterReasoning) -> None:
        self._constraint = constraint
        self._state = _State.THINKING if constraint.is_open else _State.UNDECIDED
        self._tail = b""
        self._answer = constraint.grammar.follow()

    @property
    def problem(self) -> str:
        """That of the grammar."""
        return "" if self._state is _State.THINKING else self._answer.problem

    @classmethod
    def restrict(
        cls,
        followers: Sequence["AfterReasoningFollower"],
        new_token_ids: Sequence[Sequence[int]],
        masks: np.ndarray,
    ) -> list[Standing]:
        """As Follower says."""
        rests = [follower._pass(ids) for follower, ids in zip(followers, new_token_ids, strict=True)]
        bound = [row for row, follower in enumerate(followers) if follower._state is not _State.THINKING]
        standings = [Standing.GOES_ON] * len(followers)
        if bound:
            words = masks[bound]
            found = GrammarFollower.restrict(
                [followers[row]._answer for row in bound], [rests[row] for row in bound], words
            )
            for row, row_words, standing in zip(bound, words, found, strict=True):
                followers[row]._allow_opener(masks[row], row_words)
                masks[row] = row_words
                standings[row] = standing
        return standings

    def _pass(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Take in new tokens; returns those that belong to the answer."""
        constraint = self._constraint
        for index, token_id in enumerate(token_ids):
            if self._state is _State.UNDECIDED:
                is_opener = token_id == constraint.opener
                self._state = _State.THINKING if is_opener else _State.ANSWERING
            elif self._state is _State.THINKING and self._closes(token_id):
                self._state = _State.ANSWERING
                return token_ids[index + 1 :]
            if self._state is _State.ANSWERING:
                return token_ids[index:]
        return ()

    def _closes(self, token_id: int) -> bool:
        constraint = self._constraint
        if constraint.closer is not None:
            return token_id == constraint.closer
        data = constraint.grammar.vocabulary.tokenizer.decode_bytes([token_id])
        self._tail = (self._tail + data)[-len(constraint.close) - len(data) :]
        return constraint.close in self._tail

    def _allow_opener(self, before: np.ndarray, words: np.ndarray) -> None:
        """Reasoning may begin if nothing has; `before` is what other constraints have left."""
        opener = self._constraint.opener
        if self._state is _State.UNDECIDED and opener is not None:
            word, bit = divmod(opener, WORD_BITS)
            words.view(np.uint32)[word] |= before.view(np.uint32)[word] & np.uint32(1 << bit)
