"""Llama 3.2 and 4, Olmo 3, LFM2, Gemma 3: calls as a Python list, [f(a=1), g(b="x")].

The list begins the answer, where it must call a tool of the request, or is enclosed by markers, where its
brackets may be missing. Values are read as literals and never evaluated; a positional one gets the name of
the parameter at its position.
https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_2/
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.control_tokens import is_marked, until
from server.parsing.argument_types import argument_schemas
from server.parsing.json_repair import JsonRepair
from server.parsing.parser import Marker, ToolParser, Tools

OPEN = "<|tool_call_start|>"
PAIRS = {
    "<|python_start|>": "<|python_end|>",
    OPEN: "<|tool_call_end|>",
    "<function_calls>": "</function_calls>",
    "```tool_code": "```",
}
# How templates of LFM2 list the tools; they show no call.
TOOL_LISTS = ("<|tool_list_start|>", "List of tools: [")
START = re.compile(r"[\s\[]*")
NAME = re.compile(r"[A-Za-z0-9_.:/-]*")
WORD = re.compile(r"\w*")
BETWEEN_ARGUMENTS = re.compile(r"[\s,]*")
BETWEEN_CALLS = re.compile(r"[\s,;)]*")
# The rest of a value that is no literal, such as the `+ 1` of `2 + 1`.
REST = until(",)")


class PythonicParser(ToolParser):
    """Python's syntax."""

    name = "pythonic"
    template_signs = (*PAIRS, *TOOL_LISTS)
    markers = (*PAIRS, *PAIRS.values())

    def __init__(self, tools: Tools, marker: Marker) -> None:
        super().__init__(tools, marker)
        self._closers = tuple(map(marker, PAIRS.values()))
        self._is_marked = False
        self._is_list = False
        self._name = ""
        self._writer: JsonRepair | None = None
        self._state = self._first

    @classmethod
    def call_rules(cls, tokens: Mapping[str, int]) -> None:
        """See ToolParser; there is no grammar of Python literals with a schema."""

    @classmethod
    def write_calls(cls, calls: Sequence[Mapping[str, Any]]) -> str:
        """See ToolParser; the markers are those of LFM2, whose templates leave out earlier calls."""
        texts = []
        for call in calls:
            given = call["arguments"]
            items = given.items() if isinstance(given, Mapping) else ()
            texts.append(f"{call['name']}({', '.join(f'{key}={value!r}' for key, value in items)})")
        return f"{OPEN}[{', '.join(texts)}]{PAIRS[OPEN]}"

    def _openers(self) -> Mapping[str, Callable[[], bool]]:
        return dict.fromkeys(PAIRS, self._marked)

    def _marked(self) -> bool:
        self._is_marked = True
        self._is_list = False
        self._state = self._first
        return True

    def _first(self) -> bool:
        """Read the start of a list of calls, or the first call."""
        start = self._at
        self._at = START.match(self._text, start).end()  # type: ignore[union-attr]
        self._raw.append(self._text[start : self._at])
        self._is_list = self._is_list or "[" in self._raw[-1]
        if self._at == len(self._text):
            return False
        if not (self._is_list or self._is_marked):
            return self._no_call()
        self._state = self._call
        return True

    def _call(self) -> bool:
        """Read a name and an opening bracket."""
        start = self._at
        name = self._word(NAME)
        self._raw.append(self._text[start : self._at])
        if name is None:
            return False
        is_known = self._is_marked or name in self.tools.parameters
        if self._text[self._at] != "(" or not is_known or not self.begin(name):
            return self._no_call()
        self._at += 1
        self._name = name
        self.arguments("{")
        self._state = self._argument
        return True

    def _argument(self) -> bool:
        """Read the next argument, or the end of the call."""
        self._at = BETWEEN_ARGUMENTS.match(self._text, self._at).end()  # type: ignore[union-attr]
        if self._at == len(self._text):
            return False
        char = self._text[self._at]
        if char == ")" or is_marked(char):
            self._at += char == ")"
            self._close_call()
            self._state = self._between
        elif char.isidentifier():
            self._state = self._keyword
        else:
            self._begin_value(self._place())
        return True

    def _keyword(self) -> bool:
        """Read a word: the name of the argument if `=` follows, else the start of the value."""
        word = self._word(WORD)
        if word is None:
            return False
        self._words.append(word)
        self._state = self._equals
        return True

    def _equals(self) -> bool:
        start = self._at
        is_there = self._skip_blanks()
        self._words.append(self._text[start : self._at])
        if not is_there:
            return False
        word = "".join(self._words)
        self._words.clear()
        if self._text[self._at] == "=":
            self._at += 1
            self._begin_value(word.rstrip())
        else:
            writer = self._begin_value(self._place())
            self.arguments(writer.feed(word)[0])
        return True

    def _place(self) -> str:
        """Return the name of a positional argument."""
        names = list(argument_schemas(self.tools.parameters.get(self._name, {})))
        number = self._num_arguments
        return names[number] if number < len(names) else f"arg{number}"

    def _begin_value(self, name: str) -> JsonRepair:
        self.argument(name)
        self._writer = JsonRepair()
        self._state = self._value
        return self._writer

    def _value(self) -> bool:
        assert self._writer is not None
        part, self._at = self._writer.feed(self._text, self._at)
        self.arguments(part)
        if self._writer.is_done:
            self._writer = None
            self._state = self._rest_of_value
        return True

    def _rest_of_value(self) -> bool:
        self._at = REST.match(self._text, self._at).end()  # type: ignore[union-attr]
        if self._at < len(self._text):
            self._state = self._argument
        return True

    def _between(self) -> bool:
        """After a call: read the next one, or the end of the list."""
        self._at = BETWEEN_CALLS.match(self._text, self._at).end()  # type: ignore[union-attr]
        if self._at == len(self._text):
            return False
        if self._text[self._at] == "]":
            self._at += 1
            self._is_list = False
            self._state = self._after
        elif self._text[self._at].isidentifier() and (self._is_list or self._is_marked):
            self._state = self._call
        else:
            self._state = self._after
        return True

    def _after(self) -> bool:
        """After the list: read its marker, or content."""
        if not self._skip_blanks():
            return False
        if self._accept_one(self._closers) is None:
            return False
        self._is_marked = False
        self._state = self._content
        return True

    def _close_call(self) -> None:
        if self._writer is not None:
            self.arguments(self._writer.close())
            self._writer = None
        self.arguments("}")
        self.end()
