"""What is looked for in the text of a stream beside stop strings: marked tokens, and leading reasoning."""

from collections.abc import Mapping

from engine.request import ReasoningSpan


class ReasoningTracker:
    """State of one stream. Reasoning can only come first; what follows it, or all else, is the answer."""

    def __init__(self, marks: Mapping[int, str], span: ReasoningSpan | None) -> None:
        self.marks = marks
        self.is_undecided = span is not None and not span.is_open
        self.is_reasoning = span is not None and span.is_open
        self._span = span
        self._seen = ""

    @property
    def is_answer(self) -> bool:
        """Whether what comes now is for the reader."""
        return not (self.is_undecided or self.is_reasoning)

    def advance(self, text: str) -> int | None:
        """Look at new text until the answer has begun: then, how many of the last characters belong to it."""
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
