"""Hermes' format: <tool_call>{"name": …, "arguments": …}</tool_call>.

Qwen 2.5 and 3, Granite 4 and SmolLM use it, too.

Several calls come one after the other, each between its own markers, or as a list between one pair.
https://github.com/NousResearch/Hermes-Function-Calling
"""

import re
from collections.abc import Callable, Mapping

from server.parsing.json_call import JsonToolParser
from server.parsing.parser import Marker, Tools

OPEN, CLOSE = "<tool_call>", "</tool_call>"
START = re.compile(r"[\s\[]*")
# What small models add or forget between the end of a call and the marker.
STRAY = re.compile(r"[\s,}\]]*")


class HermesParser(JsonToolParser):
    """Calls between markers, in JSON."""

    markers = (OPEN, CLOSE)
    ends = "<"

    def __init__(self, tools: Tools, marker: Marker) -> None:
        super().__init__(tools, marker)
        self._close_marker = marker(CLOSE)

    def _openers(self) -> Mapping[str, Callable[[], bool]]:
        return {OPEN: self._first}

    def _first(self) -> bool:
        """After the marker: an object, or a list of them."""
        return self._take_raw(START) and self._next_call()

    def _between(self) -> bool:
        """After a call: the marker, or the next one of a list; anything else is content."""
        self._at = STRAY.match(self._text, self._at).end()  # type: ignore[union-attr]
        if self._at == len(self._text):
            return False
        if self._text[self._at] == "{":
            return self._next_call()
        if self._accept(self._close_marker) is None:
            return False
        self._state = self._content
        return True
