"""Base classes of the parsers of all formats: content up to a marker, calls, and back to content."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from engine.control_tokens import mark, strip
from server.ids import new_id
from server.parsing.events import Arguments, CallEnd, CallStart, Content, Event, join
from server.parsing.tool_call_grammar import CallRules

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
BLANKS = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request; `parameters` are the JSON schemas of their arguments, by name.

    With `only` calls of other names are content. Without `parallel` an answer ends after its first call, else
    after a call that repeats an earlier one.
    `is_named`: the request names the tool that must be called. `is_forced`: some tool must be called.
    `is_constrained`: a grammar restricts the answer to calls, or to calls or JSON.
    """

    parameters: Mapping[str, Mapping[str, Any]]
    only: Collection[str] | None = None
    parallel: bool = True
    is_named: bool = False
    is_forced: bool = False
    is_constrained: bool = False


@dataclass(frozen=True, slots=True)
class Marker:
    """Finds a format's markers: one that is a control token is marked, text that merely spells it is not.

    `tokens` are the ids of the vocabulary's added tokens.
    """

    tokens: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, text: str) -> str:
        """Return the marker `text` as the engine delivers it."""
        return mark(text) if text in self.tokens else text


class Parser(ABC):
    """The parser of one format, a state machine over text that comes in pieces.

    A state is a method that consumes the text it can decide about, whatever may follow, and returns False if
    it needs more text to go on. Text it cannot decide about yet stays until more has come.
    """

    name: ClassVar[str]
    """The format's name in the settings."""
    template_signs: ClassVar[tuple[str, ...]]
    """A chat template that contains one of these renders the format."""
    markers: ClassVar[tuple[str, ...]]
    """Texts that are markers, also where they are control tokens of the vocabulary."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._is_final = False
        self._events: list[Event] = []
        self._words: list[str] = []  # the pieces of a word
        self._state: Callable[[], bool]

    @classmethod
    def is_shown_by(cls, template: str) -> bool:
        """Return True if a chat template renders the format."""
        return any(sign in template for sign in cls.template_signs)

    @classmethod
    def spell(cls, text: str, marker: Marker) -> str:
        """Return `text`, which may have markers in it, as the engine delivers it."""
        for name in cls.markers:
            text = text.replace(name, marker(name))
        return text

    def feed(self, text: str) -> list[Event]:
        """Parse more text; return the events it makes certain."""
        self._text = self._text[self._at :] + text if self._at < len(self._text) else text
        self._at = 0
        self._run()
        return self._take()

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """End the text; with `is_cut` it broke off, and an open call stays incomplete."""
        self._is_final = True
        self._run()
        self._end(is_cut=is_cut)
        return self._take()

    def _run(self) -> None:
        while self._at < len(self._text) and self._state():
            pass

    @abstractmethod
    def _end(self, *, is_cut: bool) -> None:
        """Emit what is held, and close what is open."""

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return join(events) if len(events) > 1 else events

    def _rest(self) -> str:
        """Consume all text that is left."""
        rest, self._at = self._text[self._at :], len(self._text)
        return rest

    def _skip_blanks(self) -> bool:
        """Consume whitespace; return True if any other text is left."""
        self._at = BLANKS.match(self._text, self._at).end()  # type: ignore[union-attr]
        return self._at < len(self._text)

    def _word(self, pattern: re.Pattern[str]) -> str | None:
        """Consume a word; return it once something else follows."""
        found = pattern.match(self._text, self._at)
        if found is not None:
            self._words.append(found[0])
            self._at = found.end()
        if self._at == len(self._text):
            return None
        word = "".join(self._words)
        self._words.clear()
        return word

    def _accept(self, marker: str) -> bool | None:
        """Consume `marker` if the text continues with it; return None if that is not certain yet."""
        if self._text.startswith(marker, self._at):
            self._at += len(marker)
            return True
        is_open = not self._is_final and len(self._text) - self._at < len(marker)
        return None if is_open and marker.startswith(self._text[self._at :]) else False

    def _accept_one(self, markers: Iterable[str]) -> str | None:
        """Consume the one of `markers` that the text continues with; "" for none, None if not certain yet."""
        is_open = False
        for marker in markers:
            answer = self._accept(marker)
            if answer:
                return marker
            is_open = is_open or answer is None
        return None if is_open else ""

    def _num_held(self, markers: Iterable[str]) -> int:
        """Return the length of the longest suffix of the text that may begin one of `markers`."""
        return 0 if self._is_final else num_begun(self._text, self._at, markers)


class ToolParser(Parser):
    """Content, and calls in it.

    Whitespace between content and a call belongs to neither. What turns out to be no call is content, as it
    was written; that must be decided before a call begins, so a call begins when its name is known.
    """

    def __init__(self, tools: Tools, marker: Marker) -> None:
        super().__init__()
        self.num_calls = 0
        self.is_call_open = False
        self.is_full = False
        self.tools = tools
        self._blanks: list[str] = []
        self._raw: list[str] = []  # of a call that has not begun
        self._num_arguments = 0
        self._ids: set[str] = set()
        self._call_name = ""
        self._call_arguments: list[str] = []  # of the open call, in pieces
        self._calls: set[tuple[str, str]] = set()  # complete ones: names and arguments
        self._content_markers = {self.spell(text, marker): state for text, state in self._openers().items()}
        pattern = "|".join(map(re.escape, self._content_markers)) or "(?!)"
        self._opener = re.compile(pattern)
        self._state = self._content

    @classmethod
    @abstractmethod
    def call_rules(cls, tokens: Mapping[str, int]) -> CallRules | None:
        """Return how a grammar writes calls in this format; None if there is no grammar of it.

        `tokens` are the ids of the vocabulary's added tokens.
        """

    @classmethod
    def write_calls(cls, calls: Sequence[Mapping[str, Any]]) -> str | None:
        """Return calls, each with its `name` and `arguments`, as text that the parser reads.

        None for a format that only chat templates write.
        """
        return None

    def _openers(self) -> Mapping[str, Callable[[], bool]]:
        """Return the markers that end content, and the state that follows each."""
        return {}

    def feed(self, text: str) -> list[Event]:
        """See Parser; text after the last call of a full answer is dropped."""
        return [] if self.is_full else super().feed(text)

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """See Parser; a call that broke off before its name is dropped where it cannot be content."""
        follows_call = self.num_calls > 0 and not self.is_call_open and self._state != self._content
        if is_cut and (self.tools.is_constrained or follows_call):
            return []
        return super().finish(is_cut=is_cut)

    def _run(self) -> None:
        while not self.is_full and self._at < len(self._text) and self._state():
            pass

    def _content(self) -> bool:
        """Emit text up to the next marker; what may begin one is held back."""
        found = self._opener.search(self._text, self._at)
        if found is None:
            end = len(self._text) - self._num_held(self._content_markers)
            self._say(self._text[self._at : end])
            self._at = end
            return False
        self._say(self._text[self._at : found.start()])
        self._at = found.end()
        self._raw = [found[0]]
        self._state = self._content_markers[found[0]]
        return True

    def _say(self, text: str) -> None:
        """Emit content, but hold whitespace at its end, which may come before a call."""
        text = strip(text)
        said = text.rstrip()
        if said:
            self._events.append(Content("".join(self._blanks) + said))
            self._blanks.clear()
        self._blanks.append(text[len(said) :])

    def _no_call(self) -> bool:
        """Emit what was held for a call as content, and continue with content."""
        self._say("".join(self._raw))
        self._raw = []
        self._state = self._content
        return True

    def begin(self, name: str, call_id: str | None = None) -> bool:
        """Begin a call; return False if `name` cannot be called. A `call_id` that is taken is replaced."""
        if not NAME.fullmatch(name) or (self.tools.only is not None and name not in self.tools.only):
            return False
        self._raw = []
        self._blanks.clear()
        self._num_arguments = 0
        if call_id is None or call_id in self._ids:
            call_id = self._new_id()
        self._ids.add(call_id)
        self._call_name = name
        self._events.append(CallStart(self.num_calls, call_id, name))
        self.is_call_open = True
        return True

    def arguments(self, text: str) -> None:
        """Add text to the arguments of the open call."""
        if text:
            self._call_arguments.append(text)
            self._events.append(Arguments(self.num_calls, text))

    def argument(self, name: str) -> None:
        """Begin the next argument of a call whose arguments come one by one; its value follows."""
        self.arguments(f"{', ' if self._num_arguments else ''}{json.dumps(name, ensure_ascii=False)}: ")
        self._num_arguments += 1

    def end(self) -> None:
        """Complete the open call. The answer is full after its only call, or one that repeats another.

        Small models that must call a tool repeat one call until the limit of tokens.
        """
        self._events.append(CallEnd(self.num_calls))
        self.num_calls += 1
        self.is_call_open = False
        call = self._call_name, canonical_json("".join(self._call_arguments))
        self._call_arguments.clear()
        self.is_full = not self.tools.parallel or call in self._calls
        self._calls.add(call)

    def _new_id(self) -> str:
        return f"call_{new_id()[:24]}"

    def _end(self, *, is_cut: bool) -> None:
        if self.is_full:
            return
        if self.is_call_open:
            if not is_cut:
                self._close_call()
            return
        self._raw.append(self._rest())
        self._no_call()
        if (blanks := "".join(self._blanks)) and not self.num_calls:
            self._events.append(Content(blanks))

    @abstractmethod
    def _close_call(self) -> None:
        """Complete the arguments of the open call, and end it."""


def num_begun(text: str, start: int, markers: Iterable[str]) -> int:
    """Return the length of the longest suffix of `text[start:]` that may begin one of `markers`."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text) - start), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


def canonical_json(text: str) -> str:
    """Return JSON `text` in a form that is equal for equal values; text that Python cannot read stays."""
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:  # an integer of more than 4,300 digits
        return text
