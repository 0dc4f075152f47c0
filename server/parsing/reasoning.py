"""Reasoning that comes before the answer, between two markers: <think>…</think>, [THINK]…[/THINK].

Many templates write the opening marker themselves, so that the text begins inside. The rules are those of
engine.text.reasoning: reasoning comes first or not at all.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

from engine.control_tokens import strip
from engine.request import ReasoningSpan
from server.parsing.events import Content, Reasoning
from server.parsing.parser import Marker, Parser


class ReasoningParser(Parser):
    """Reasoning, then content. Whitespace next to the markers belongs to neither.

    `markers` of a format are the opening and the closing one. Marks of control tokens stay in the content,
    for the parser of calls.
    """

    after_opener: ClassVar[str] = ""
    """Text that belongs to the opening marker, after it."""
    answer_markers: ClassVar[Mapping[str, str]] = {}
    """Markers around an answer that follows reasoning, opening and closing ones, which are no part of it."""
    marks_every_answer: ClassVar[bool] = False
    """Answers without reasoning have these markers, too."""

    def __init__(self, marker: Marker, *, is_open: bool) -> None:
        super().__init__()
        self._open_marker, self._close_marker = self.ends(marker)
        self._is_open = is_open
        self._blanks: list[str] = []
        self._answer_markers = {marker(start): marker(end) for start, end in self.answer_markers.items()}
        self._answer_end = ""  # the closing marker to come
        self._state = self._first

    @classmethod
    def ends(cls, marker: Marker) -> tuple[str, str]:
        """Return the texts that begin and end reasoning, as the engine delivers them."""
        opener, closer = map(marker, cls.markers)
        return opener + cls.after_opener, closer

    @classmethod
    def span(cls, marker: Marker, *, is_open: bool) -> ReasoningSpan:
        """Return what the engine looks for: it counts reasoning tokens and ignores stop strings in them."""
        opener, closer = cls.ends(marker)
        return ReasoningSpan(opener, closer, is_open)

    def _first(self) -> bool:
        """Decide if the text begins with reasoning; models may repeat the marker that ends the prompt.

        A closing marker alone is reasoning without text.
        """
        start = self._at
        is_there = self._skip_blanks()
        self._blanks.append(self._text[start : self._at])
        answer_markers = self._answer_markers if self.marks_every_answer and not self._is_open else ()
        markers = (self._open_marker, self._close_marker, *answer_markers)
        marker = self._accept_one(markers) if is_there else None
        if marker is None:
            return False
        if marker in self._answer_markers:
            self._begin_answer(marker)
        elif marker == self._close_marker:
            self._blanks.clear()
            self._state = self._closing
        elif marker or self._is_open:
            self._blanks.clear()
            self._state = self._opening
        else:
            self._state = self._content
        return True

    def _opening(self) -> bool:
        if self._skip_blanks():
            self._state = self._reasoning
        return True

    def _reasoning(self) -> bool:
        return self._read_until(self._close_marker, Reasoning, self._closing)

    def _closing(self) -> bool:
        """Read up to the answer, and its opening marker if there is one."""
        start = self._accept_one(self._answer_markers) if self._skip_blanks() else None
        if start is None:
            return False
        if start:
            self._begin_answer(start)
        else:
            self._state = self._content
        return True

    def _begin_answer(self, marker: str) -> None:
        self._blanks.clear()
        self._answer_end = self._answer_markers[marker]
        self._state = self._answer_begins

    def _answer_begins(self) -> bool:
        if self._skip_blanks():
            self._state = self._answer
        return True

    def _answer(self) -> bool:
        return self._read_until(self._answer_end, Content, self._content)

    def _read_until(
        self, marker: str, event: type[Reasoning] | type[Content], following: Callable[[], bool]
    ) -> bool:
        """Emit text up to a marker, without the whitespace before it; the state after it is `following`."""
        end = self._text.find(marker, self._at)
        is_over = end >= 0
        if not is_over:
            end = len(self._text) - self._num_held((marker,))
        text = self._text[self._at : end]
        if event is Reasoning:
            text = strip(text)
        said = text.rstrip()
        if said:
            self._events.append(event("".join(self._blanks) + said))
            self._blanks.clear()
        self._blanks.append(text[len(said) :])
        self._at = end
        if is_over:
            self._blanks.clear()
            self._at += len(marker)
            self._state = following
        return is_over

    def _content(self) -> bool:
        self._events.append(Content("".join(self._blanks) + self._rest()))
        self._blanks.clear()
        return True

    def _end(self, *, is_cut: bool) -> None:
        if (blanks := "".join(self._blanks)) and self._state == self._first and not self._is_open:
            self._events.append(Content(blanks))
