"""Base of formats that write a call in tags, with the values of its arguments as plain text.

A value is a string or JSON: the schema of the tool says which.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

from engine.control_tokens import is_marked, until
from server.parsing.argument_types import STRING, argument_types
from server.parsing.json_repair import JsonRepair
from server.parsing.parser import Marker, ToolParser, Tools
from server.parsing.tagged_grammar import TagRules
from server.parsing.tool_call_grammar import CallRules

NAME = until(r"<>\s\"")
KEY = until(r"<>\n\"")
# The text between a key and its value: the end of a tag, with its attributes.
ATTRIBUTES = until("<>")
# Between arguments only tags have a meaning.
NO_TAG = until("<")
# A control token ends a value even without its tag.
UNMARKED = until("")
IS_STRING = re.compile(r'string="(true|false)"')


class Tags(NamedTuple):
    """The texts around the parts of a call.

    A call is `function` NAME `after_name`, arguments, `end_function`. An argument is `parameter` KEY
    `after_key` `value` `newline` VALUE `newline` `end_value`. Without `function` the name follows the opening
    marker, and without `end_function` the closing one ends the call.
    """

    function: str
    after_name: str
    end_function: str
    parameter: str
    after_key: str
    value: str
    end_value: str
    newline: str = ""


class TaggedToolParser(ToolParser):
    """Tags between markers."""

    blocks: ClassVar[Mapping[str, str]]
    """The markers around calls: opening and closing ones."""
    tags: ClassVar[Tags]
    shares_block: ClassVar[bool] = False
    """All calls of an answer are between one pair of markers."""

    @classmethod
    def call_rules(cls, tokens: Mapping[str, int]) -> CallRules | None:
        """See ToolParser."""
        [(opener, closer), *_] = cls.blocks.items()
        return TagRules(cls.tags, cls.markers, tokens).rules(opener, closer, shares_block=cls.shares_block)

    def __init__(self, tools: Tools, marker: Marker) -> None:
        super().__init__(tools, marker)
        self._tags = Tags(*(self.spell(tag, marker) for tag in self.tags))
        self._closers = tuple(self.spell(closer, marker) for closer in self.blocks.values())
        self._name = self._key_name = ""
        self._attributes: list[str] = []
        self._value: Value | None = None

    def _openers(self) -> Mapping[str, Callable[[], bool]]:
        openers: dict[str, Callable[[], bool]] = dict.fromkeys(self.blocks, self._function)
        if self.tags.function:
            openers[self.tags.function] = self._function_name
        return openers

    def _function(self) -> bool:
        """Read the tag of a function after the marker."""
        start = self._at
        is_there = self._skip_blanks()
        self._raw.append(self._text[start : self._at])
        answer = self._accept(self._tags.function) if is_there else None
        if answer is None:
            return False
        if not answer:
            return self._no_call()
        self._raw.append(self._tags.function)
        self._state = self._function_name
        return True

    def _function_name(self) -> bool:
        start = self._at
        name = self._word(NAME)
        self._raw.append(self._text[start : self._at])
        if name is None:
            return False
        self._name = name
        self._state = self._after_name
        return True

    def _after_name(self) -> bool:
        """Begin the call if its tag ends after the name."""
        answer = self._accept(self._tags.after_name)
        if answer is None:
            return False
        char = self._text[self._at : self._at + 1]
        is_end = answer and (bool(self._tags.after_name) or char in "\r\n<" or is_marked(char))
        if not is_end or not self.begin(self._name):
            self._raw.append(self._tags.after_name if answer else "")
            return self._no_call()
        self.arguments("{")
        self._state = self._parameter
        return True

    def _parameter(self) -> bool:
        """Read the next argument, or the end of the call."""
        self._at = NO_TAG.match(self._text, self._at).end()  # type: ignore[union-attr]
        if self._at == len(self._text):
            return False
        ends = tuple(filter(None, (self._tags.end_function, *self._closers)))
        tag = self._accept_one((self._tags.parameter, *ends))
        if tag is None:
            return False
        if tag == self._tags.parameter:
            self._state = self._key
        elif tag or is_marked(self._text[self._at]):
            self._close_call()
            self._state = self._content if tag in self._closers else self._between
        else:
            self._at += 1
        return True

    def _key(self) -> bool:
        key = self._word(KEY)
        if key is None:
            return False
        self._key_name = key
        self._attributes.clear()
        self._state = self._after_key
        return True

    def _after_key(self) -> bool:
        """Read up to the value; a key without one is dropped."""
        start = self._at
        self._at = ATTRIBUTES.match(self._text, start).end()  # type: ignore[union-attr]
        self._attributes.append(self._text[start : self._at])
        if self._at == len(self._text):
            return False
        tags = (self._tags.after_key, self._tags.value) if self._tags.after_key else (">",)
        tag = self._accept_one(tags)
        if tag is None:
            return False
        if tag == tags[-1]:
            self._begin_value()
        elif not tag:
            self._state = self._parameter
        return True

    def _begin_value(self) -> None:
        self.argument(self._key_name)
        declared = IS_STRING.search("".join(self._attributes))
        if declared is not None:
            types = STRING if declared[1] == "true" else frozenset(("object",))
        else:
            types = argument_types(self.tools.parameters.get(self._name, {}), self._key_name)
        self._value = Value(types, has_newlines=bool(self._tags.newline))
        self._state = self._in_value

    def _in_value(self) -> bool:
        assert self._value is not None
        end_value = self._tags.end_value
        end = self._text.find(end_value, self._at)
        is_over = end >= 0
        if not is_over:
            end = len(self._text) - self._num_held((end_value,))
        stop = UNMARKED.match(self._text, self._at, end).end()  # type: ignore[union-attr]
        self.arguments(self._value.feed(self._text[self._at : stop]))
        self._at = stop
        if stop == end:
            if not is_over:
                return False
            self._at += len(end_value)
        self.arguments(self._value.close())
        self._value = None
        self._state = self._parameter
        return True

    def _between(self) -> bool:
        """After a call: read the next one, the marker, or content."""
        if not self._skip_blanks():
            return False
        tag = self._accept_one(filter(None, (*self._closers, self._tags.function)))
        if tag is None:
            return False
        is_next = bool(tag) and tag == self._tags.function
        self._raw = [tag] if is_next else []
        self._state = self._function_name if is_next else self._content
        return True

    def _close_call(self) -> None:
        if self._value is not None:
            self.arguments(self._value.close())
            self._value = None
        self._words.clear()
        self.arguments("}")
        self.end()


class Value:
    """Converts the text of a value to JSON.

    A string is written as it comes; a value that may have another type is converted at its end. Types that
    are not known mean a string.
    """

    def __init__(self, types: frozenset[str], *, has_newlines: bool) -> None:
        self._types = types
        self._has_newlines = has_newlines
        self._is_string = types <= STRING
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
            out = '"' if self._is_string else ""
            if self._has_newlines:
                text = text.removeprefix("\n")
        if self._has_newlines:
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
