"""Hermes: <tool_call>{"name": …, "arguments": …}</tool_call>. Also Qwen 2.5 and 3, Granite 4, SmolLM.

Several calls follow one another, each between its own markers, or as a list between one pair.
https://github.com/NousResearch/Hermes-Function-Calling
"""

import re
from collections.abc import Callable, Mapping

from server.parsing.json_call import JsonToolParser
from server.parsing.parser import Marker, Tools
from server.parsing.tool_call_grammar import CallRules, json_call_rule, marker_rule

OPEN, CLOSE = "<tool_call>", "</tool_call>"
START = re.compile(r"[\s\[]*")
# What small models write between the end of a call and the marker.
STRAY = re.compile(r"[\s,}\]]*")


class HermesParser(JsonToolParser):
    """JSON between markers. Forced calls of formats without a grammar are written like this, too."""

    name = "hermes"
    template_signs = (OPEN,)
    markers = (OPEN, CLOSE)
    ends = "<"

    @classmethod
    def call_rules(cls, tokens: Mapping[str, int]) -> CallRules:
        """See ToolParser."""
        call = f'{marker_rule(OPEN, tokens)} "\\n" tool "\\n" {marker_rule(CLOSE, tokens)}'
        return CallRules(call, '"\\n"', lambda function, layout: json_call_rule(function))

    def __init__(self, tools: Tools, marker: Marker) -> None:
        super().__init__(tools, marker)
        self._close_marker = marker(CLOSE)

    def _openers(self) -> Mapping[str, Callable[[], bool]]:
        return {OPEN: self._first}

    def _first(self) -> bool:
        """Read an object, or a list of them, after the marker."""
        return self._take_raw(START) and self._next_call()

    def _between(self) -> bool:
        """After a call: read the marker, or the next call of a list; anything else is content."""
        self._at = STRAY.match(self._text, self._at).end()  # type: ignore[union-attr]
        if self._at == len(self._text):
            return False
        if self._text[self._at] == "{":
            return self._next_call()
        if self._accept(self._close_marker) is None:
            return False
        self._state = self._content
        return True
