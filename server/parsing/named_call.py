"""Bases of formats that write a call's name in a header, and JSON arguments after it."""

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

from server.parsing.json_arguments import JsonArgumentsParser
from server.parsing.json_repair import JsonRepair
from server.parsing.parser import Marker, Tools
from server.parsing.quoted_json import QuotedJson

# Far more than a name of 128 characters needs: a longer header is content.
MAX_HEADER_CHARS = 512
# What may be between the arguments and a marker: the end of a block of Markdown.
STRAY = re.compile(r"[\s`]*")


class NamedCallParser(JsonArgumentsParser):
    """Calls between markers of their own, all of them between one more pair."""

    section: ClassVar[tuple[str, str]] = ("", "")
    """The markers around all calls, if there are any."""
    call: ClassVar[tuple[str, str]]
    """The markers around each call."""

    def __init__(self, tools: Tools, marker: Marker) -> None:
        super().__init__(tools, marker)
        self._section_end = self.spell(self.section[1], marker)
        self._call_start, self._call_end = map(marker, self.call)
        self._header_end = re.compile(r"\{|" + re.escape(self._call_end))
        self._header: list[str] = []
        self._num_header_chars = 0

    @abstractmethod
    def _named(self, header: str) -> tuple[str, str | None]:
        """Return the name of the tool in a header, "" if there is none, and the id of the call, if any."""

    def _openers(self) -> Mapping[str, Callable[[], bool]]:
        openers = {self.section[0]: self._in_section, self.call[0]: self._begin_header}
        return {marker: state for marker, state in openers.items() if marker}

    def _in_section(self) -> bool:
        """Read the marker of the next call, or of the end; anything else is content."""
        start = self._at
        is_there = self._skip_blanks()
        self._raw.append(self._text[start : self._at])
        marker = self._accept_one((self._call_start, self._section_end)) if is_there else None
        if marker is None:
            return False
        self._raw.append(marker)
        if marker == self._call_start:
            self._state = self._begin_header
            return True
        if self.num_calls:
            self._raw = []
        return self._no_call()

    def _begin_header(self) -> bool:
        self._header.clear()
        self._num_header_chars = 0
        self._state = self._in_header
        return True

    def _in_header(self) -> bool:
        """Read a header up to the arguments; a call may end without any."""
        found = self._header_end.search(self._text, self._at)
        end = found.start() if found else len(self._text) - self._num_held((self._call_end,))
        text = self._text[self._at : end]
        self._at = end
        self._header.append(text)
        self._raw.append(text)
        self._num_header_chars += len(text)
        if self._num_header_chars > MAX_HEADER_CHARS:
            return self._no_call()
        if found is None:
            return False
        name, call_id = self._named("".join(self._header))
        if not self.begin(name, call_id):
            return self._no_call()
        if found[0] == "{":
            self._begin_arguments(self._new_writer())
        else:
            self._end_call("{}")
        return True

    def _new_writer(self) -> JsonRepair:
        """Return what reads the arguments of a call."""
        return JsonRepair()

    def _after_call(self) -> bool:
        """Read the markers after a call; anything else is content."""
        self._at = STRAY.match(self._text, self._at).end()  # type: ignore[union-attr]
        if self._at == len(self._text):
            return False
        markers = (self._call_end, self._call_start, self._section_end)
        marker = self._accept_one(filter(None, markers))
        if marker is None:
            return False
        if marker == self._call_start:
            self._raw = [marker]
            self._state = self._begin_header
        elif marker != self._call_end:
            self._state = self._content
        return True


class QuotedCallParser(NamedCallParser):
    """Calls of Gemma, `call:` and the name, with a control token for the quotes of strings.

    The control token of a result, which only a client may write, ends the answer.
    """

    quote: ClassVar[str]
    result: ClassVar[str]

    @classmethod
    def call_rules(cls, tokens: Mapping[str, int]) -> None:
        """See ToolParser; there is no grammar of JSON with such quotes."""

    def __init__(self, tools: Tools, marker: Marker) -> None:
        super().__init__(tools, marker)
        self._quote = marker(self.quote)

    def _openers(self) -> Mapping[str, Callable[[], bool]]:
        return {**super()._openers(), self.result: self._stop}

    def _stop(self) -> bool:
        self.is_full = True
        return False

    def _named(self, header: str) -> tuple[str, str | None]:
        head, separator, name = header.strip().partition("call:")
        return (name.strip() if separator and not head else ""), None

    def _new_writer(self) -> JsonRepair:
        return QuotedJson(self._quote)
