"""Qwen3-Coder, Qwen 3.5: calls in tags, with the values of arguments as plain text.

    <tool_call><function=f><parameter=a>
    1
    </parameter></function></tool_call>

A value is a string or JSON: the schema of the tool says which. https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from engine.control_tokens import first_of, is_marked, until
from server.parsing.json_repair import JsonRepair
from server.parsing.parser import Marker, ToolParser, Tools

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
NAME = re.compile(r"[^<>\s]*")
KEY = re.compile(r"[^>\n]*")
# Between parameters only tags have a meaning.
NO_TAG = until("<")
END_VALUE = first_of(END_PARAMETER)


class QwenCoderParser(ToolParser):
    """Tags."""

    name = "qwen3_coder"
    template_signs = (FUNCTION,)
    markers = (OPEN, CLOSE)

    def __init__(self, tools: Tools, marker: Marker) -> None:
        super().__init__(tools, marker)
        self._open_marker, self._close_marker = marker(OPEN), marker(CLOSE)
        self._name = ""
        self._value: _Value | None = None

    @classmethod
    def call_rules(cls, tokens: Mapping[str, int]) -> None:
        """See ToolParser; there is no grammar of plain text that obeys a schema."""

    def _openers(self) -> Mapping[str, Callable[[], bool]]:
        return {OPEN: self._function, FUNCTION: self._function_name}

    def _function(self) -> bool:
        """Read the tag of a function after the marker."""
        start = self._at
        is_there = self._skip_blanks()
        self._raw.append(self._text[start : self._at])
        answer = self._accept(FUNCTION) if is_there else None
        if answer is None:
            return False
        if not answer:
            return self._no_call()
        self._raw.append(FUNCTION)
        self._state = self._function_name
        return True

    def _function_name(self) -> bool:
        start = self._at
        name = self._word(NAME)
        self._raw.append(self._text[start : self._at])
        if name is None:
            return False
        if self._text[self._at] != ">" or not self.begin(name):
            return self._no_call()
        self._at += 1
        self._name = name
        self.arguments("{")
        self._state = self._parameter
        return True

    def _parameter(self) -> bool:
        """Read the next parameter, or the end of the call."""
        self._at = NO_TAG.match(self._text, self._at).end()  # type: ignore[union-attr]
        if self._at == len(self._text):
            return False
        tag = self._accept_one((PARAMETER, END_FUNCTION, self._close_marker))
        if tag is None:
            return False
        if tag == PARAMETER:
            self._state = self._key
        elif tag or is_marked(self._text[self._at]):
            self._close_call()
            self._state = self._content if tag == self._close_marker else self._between
        else:
            self._at += 1
        return True

    def _key(self) -> bool:
        key = self._word(KEY)
        if key is None:
            return False
        self._at += 1
        self.argument(key)
        self._value = _Value(self.tools.properties(self._name).get(key))
        self._state = self._in_value
        return True

    def _in_value(self) -> bool:
        assert self._value is not None
        found = END_VALUE.search(self._text, self._at)
        end = found.start() if found else len(self._text) - self._num_held((END_PARAMETER,))
        self.arguments(self._value.feed(self._text[self._at : end]))
        self._at = end
        if found is None:
            return False
        self._at += len(END_PARAMETER) if found[0] == END_PARAMETER else 0
        self.arguments(self._value.close())
        self._value = None
        self._state = self._parameter
        return True

    def _between(self) -> bool:
        """After a call: read the next one, the marker, or content."""
        if not self._skip_blanks():
            return False
        tag = self._accept_one((self._close_marker, FUNCTION))
        if tag is None:
            return False
        self._raw = [tag] if tag == FUNCTION else []
        self._state = self._function_name if tag == FUNCTION else self._content
        return True

    def _close_call(self) -> None:
        if self._value is not None:
            self.arguments(self._value.close())
            self._value = None
        elif self._state == self._key:
            self._words.clear()
        self.arguments("}")
        self.end()


class _Value:
    """Converts the text between two tags to JSON. The newlines next to the tags are not part of it.

    A string is written as it comes; a value that may have another type is converted at its end.
    """

    def __init__(self, schema: Any) -> None:
        self._types = types_of(schema)
        self._is_string = self._types <= {"string"}
        self._is_first = True
        self._newline = ""
        self._parts: list[str] = []

    def feed(self, text: str) -> str:
        """Add text; return the JSON that is certain."""
        if not text:
            return ""
        out = ""
        if self._is_first:
            self._is_first = False
            text = text.removeprefix("\n")
            out = '"' if self._is_string else ""
        text = self._newline + text
        self._newline = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        if self._is_string:
            return out + json.dumps(text, ensure_ascii=False)[1:-1]
        self._parts.append(text)
        return out

    def close(self) -> str:
        """Return the rest of the JSON."""
        if self._is_string:
            return '""' if self._is_first else '"'
        text = "".join(self._parts)
        word = text.strip()
        if "string" in self._types and not (word == "null" and "null" in self._types):
            return json.dumps(text, ensure_ascii=False)
        writer = JsonRepair()
        return writer.feed(word)[0] + writer.close()


def types_of(schema: Any) -> frozenset[str]:
    """Return the JSON types that a schema names."""
    if not isinstance(schema, Mapping):
        return frozenset()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        types |= {name for name in declared if isinstance(name, str)}
    for kind in ("anyOf", "oneOf"):
        choices = schema.get(kind)
        for choice in choices if isinstance(choices, list) else ():
            types |= types_of(choice)
    return frozenset(types)
