"""Base of formats whose answers are messages with headers: one parser reads reasoning, content and calls."""

from abc import abstractmethod

from engine.control_tokens import strip
from engine.request import ReasoningSpan
from server.parsing.events import Reasoning
from server.parsing.parser import Marker, ToolParser, Tools

# Separates texts of one kind that come in several messages.
BREAK = "\n\n"


class WholeParser(ToolParser):
    """Parses all of an answer.

    Without `separates_reasoning` reasoning is content. With `is_continued` the answer begins as content, in a
    message whose beginning is in the prompt.
    """

    def __init__(
        self, tools: Tools, marker: Marker, *, separates_reasoning: bool = True, is_continued: bool = False
    ) -> None:
        super().__init__(tools, marker)
        self._separates_reasoning = separates_reasoning
        self._is_reasoning = False  # in the message that is read
        self._has_said = is_continued
        self._has_reasoned = False
        self._reasoning_blanks: list[str] = []

    @classmethod
    @abstractmethod
    def span(cls, marker: Marker) -> ReasoningSpan:
        """Return the markers of reasoning at the beginning, whose tokens the engine counts."""

    def _begin_text(self, *, is_reasoning: bool) -> None:
        """Begin a message of text; a break separates it from an earlier one of its kind."""
        self._is_reasoning = is_reasoning and self._separates_reasoning
        if self._is_reasoning:
            self._reasoning_blanks = [BREAK] if self._has_reasoned else []
        elif self._has_said:
            self._blanks = [BREAK]

    def _add_text(self, text: str) -> None:
        """Emit text of the message; whitespace around reasoning is dropped."""
        if not self._is_reasoning:
            self._say(text)
            self._has_said = self._has_said or bool(text.strip())
            return
        text = strip(text)
        said = text.rstrip()
        if said:
            whole = "".join(self._reasoning_blanks) + said
            self._events.append(Reasoning(whole if self._has_reasoned else whole.lstrip()))
            self._reasoning_blanks.clear()
            self._has_reasoned = True
        self._reasoning_blanks.append(text[len(said) :])
