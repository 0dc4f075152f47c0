"""Llama 3's format: {"name": …, "parameters": …} in place of an answer, several of them set apart by `;`.

A call stands at the beginning of the answer or after <|python_tag|>. As nothing closes it and nothing need
open it, it must call a tool of the request; any other object is an answer in JSON.
https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/
"""

import re
from collections.abc import Callable, Mapping

from server.parsing.json_call import JsonToolParser
from server.parsing.parser import Marker, Tools

PYTHON_TAG = "<|python_tag|>"
START = re.compile(r"[\s\[]*")
BETWEEN = re.compile(r"[\s;,\]}]*")


class LlamaParser(JsonToolParser):
    """Calls in bare JSON."""

    markers = (PYTHON_TAG,)

    def __init__(self, tools: Tools, marker: Marker) -> None:
        super().__init__(tools, marker)
        self._tag = marker(PYTHON_TAG)
        self._state = self._first

    def _openers(self) -> Mapping[str, Callable[[], bool]]:
        return {PYTHON_TAG: self._first}

    def begin(self, name: str, call_id: str | None = None) -> bool:
        """Only tools of the request are called."""
        return name in self.tools.parameters and super().begin(name, call_id)

    def _first(self) -> bool:
        """An object, or a list of them."""
        return self._take_raw(START) and self._next_call()

    def _between(self) -> bool:
        """After a call: another one, or content."""
        self._at = BETWEEN.match(self._text, self._at).end()  # type: ignore[union-attr]
        if self._at == len(self._text) or (is_tag := self._accept(self._tag)) is None:
            return False
        if is_tag:
            self._raw = [self._tag]
            self._state = self._first
        elif self._text[self._at] == "{":
            self._next_call()
        else:
            self._state = self._content
        return True
