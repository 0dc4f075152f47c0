"""Finds the end of the reasoning at the beginning of an output."""

from collections.abc import Mapping

from engine.request import ReasoningSpan


class ReasoningTracker:
    """The state of one stream. Only the beginning of an output can be reasoning; the rest is the answer.

    `marks` are the tokens that are shown with a mark, by id.
    """

    def __init__(self, marks: Mapping[int, str], span: ReasoningSpan | None) -> None:
        self.marks = marks
        self.is_undecided = span is not None and not span.is_open
        self.is_reasoning = span is not None and span.is_open
        self._span = span
        self._seen = ""

    @property
    def is_answer(self) -> bool:
        """True once the answer has begun."""
        return not (self.is_undecided or self.is_reasoning)

    def advance(self, text: str) -> int | None:
        """Consume new text; return how many of the last characters are the answer, None before it begins."""
        assert self._span is not None
        self._seen += text
        if self.is_undecided:
            lead = self._seen.lstrip()
            if self._span.open.startswith(lead):
                return None
            self.is_undecided = False
            if not lead.startswith(self._span.open):
                return len(self._seen)
            self.is_reasoning = True
        end = self._seen.find(self._span.close)
        if end < 0:
            self._seen = self._seen[-len(self._span.close) :]
            return None
        self.is_reasoning = False
        return len(self._seen) - end - len(self._span.close)
