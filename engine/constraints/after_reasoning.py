"""Restricts an output by a grammar (`grammar`), or only the answer that follows the model's reasoning."""

from collections.abc import Sequence
from enum import Enum, auto

import numpy as np

from engine.constraint import WORD_BITS, Constraint, MatchState
from engine.constraints.grammar import CompiledGrammar, GrammarMatcher
from engine.control_tokens import mark, strip
from engine.request import SamplingParams
from engine.text.token_bytes import TokenPieces


class _State(Enum):
    UNDECIDED = auto()  # no token yet: the first one begins the reasoning or the answer
    THINKING = auto()
    ANSWERING = auto()


def applies(sampling: SamplingParams) -> bool:
    """Return True if there is a grammar."""
    return sampling.grammar is not None


def make(sampling: SamplingParams, pieces: TokenPieces, compiled: CompiledGrammar | None) -> Constraint:
    """Return the grammar, of the answer alone if the model may reason first."""
    assert compiled is not None and sampling.grammar is not None
    if sampling.reasoning is None or sampling.grammar.includes_reasoning:
        return compiled
    ids = {mark(text): token_id for token_id, text in sampling.marks}
    span = sampling.reasoning
    return AfterReasoning(compiled, ids.get(span.open), ids.get(span.close), span.close, span.is_open)


class AfterReasoning:
    """Applies a grammar after reasoning, which is not restricted.

    `opener` and `closer` are the token ids of the markers, None for a marker of several tokens: such a closer
    is searched for in the text, and with such an opener only the prompt can begin the reasoning.
    """

    def __init__(
        self, grammar: CompiledGrammar, opener: int | None, closer: int | None, close: str, is_open: bool
    ) -> None:
        self.grammar = grammar
        self.opener = opener
        self.closer = closer
        self.close = strip(close).encode()
        self.is_open = is_open

    def start(self) -> "AfterReasoningMatcher":
        """Return a matcher for a new sequence."""
        return AfterReasoningMatcher(self)


class AfterReasoningMatcher:
    """The state of one sequence: before, in, or after its reasoning."""

    def __init__(self, constraint: AfterReasoning) -> None:
        self._constraint = constraint
        self._state = _State.THINKING if constraint.is_open else _State.UNDECIDED
        self._tail = b""
        self._answer = constraint.grammar.start()

    @property
    def problem(self) -> str:
        """The problem of the grammar; see Matcher."""
        return "" if self._state is _State.THINKING else self._answer.problem

    @classmethod
    def fill_masks(
        cls,
        matchers: Sequence["AfterReasoningMatcher"],
        new_token_ids: Sequence[Sequence[int]],
        masks: np.ndarray,
    ) -> list[MatchState]:
        """Apply the grammar to the rows whose answer may have begun; see Matcher."""
        rests = [matcher._consume(ids) for matcher, ids in zip(matchers, new_token_ids, strict=True)]
        bound = [row for row, matcher in enumerate(matchers) if matcher._state is not _State.THINKING]
        states = [MatchState.MUST_CONTINUE] * len(matchers)
        if bound:
            words = masks[bound]
            found = GrammarMatcher.fill_masks(
                [matchers[row]._answer for row in bound], [rests[row] for row in bound], words
            )
            for row, row_words, state in zip(bound, words, found, strict=True):
                matchers[row]._allow_opener(masks[row], row_words)
                masks[row] = row_words
                states[row] = state
        return states

    def _consume(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Consume new tokens; return those that belong to the answer."""
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
        """Allow the opener as the first token, if the mask of the other constraints, `before`, does."""
        opener = self._constraint.opener
        if self._state is _State.UNDECIDED and opener is not None:
            word, bit = divmod(opener, WORD_BITS)
            words.view(np.uint32)[word] |= before.view(np.uint32)[word] & np.uint32(1 << bit)
