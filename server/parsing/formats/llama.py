"""Llama 3: {"name": …, "parameters": …} in place of an answer, several separated by `;`.

A call begins the answer or follows <|python_tag|>. Since no marker closes it and none has to open it, it must
call a tool of the request; any other object is an answer in JSON.
https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from server.parsing.json_call import JsonToolParser
from server.parsing.parser import Marker, Tools
from server.parsing.tool_call_grammar import CallRules, Layout, arguments_schema, json_call_rule, json_rule
from server.schema.tools import FunctionDefinition

PYTHON_TAG = "<|python_tag|>"
START = re.compile(r"[\s\[]*")
BETWEEN = re.compile(r"[\s;,\]}]*")


DEFINITIONS = ("$defs", "definitions")


class LlamaParser(JsonToolParser):
    """Bare JSON."""

    name = "llama3_json"
    template_signs = (PYTHON_TAG, '"parameters": dictionary')
    markers = (PYTHON_TAG,)

    def __init__(self, tools: Tools, marker: Marker) -> None:
        super().__init__(tools, marker)
        self._tag = marker(PYTHON_TAG)
        self._state = self._first

    @classmethod
    def call_rules(cls, tokens: Mapping[str, int]) -> CallRules:
        """See ToolParser."""
        return CallRules("tool", '"; "', call_rule)

    def _openers(self) -> Mapping[str, Callable[[], bool]]:
        return {PYTHON_TAG: self._first}

    def begin(self, name: str, call_id: str | None = None) -> bool:
        """See ToolParser; only tools of the request can be called."""
        return name in self.tools.parameters and super().begin(name, call_id)

    def _first(self) -> bool:
        """Read an object, or a list of them."""
        return self._take_raw(START) and self._next_call()

    def _between(self) -> bool:
        """After a call: read another one, or content."""
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


def call_rule(function: FunctionDefinition, layout: Layout | None) -> str:
    """Return the Lark for a call.

    Text cannot decide between a call and a JSON answer in advance, so the call is JSON of a schema there.
    """
    if layout is None:
        return json_call_rule(function, arguments="parameters")
    return json_rule(function, call_schema(function.name, arguments_schema(function)), layout)


def call_schema(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a call; definitions move to its root, where references look for them."""
    definitions = {key: arguments[key] for key in DEFINITIONS if key in arguments}
    parameters = {key: value for key, value in arguments.items() if key not in DEFINITIONS}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
        **definitions,
    }
