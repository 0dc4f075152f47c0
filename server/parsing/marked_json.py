"""Base of formats whose calls are JSON objects between markers, singly or several together."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from server.parsing.json_call import JsonToolParser
from server.parsing.parser import Marker, Tools
from server.parsing.tool_call_grammar import CallRules, json_call_rule, marked_rule

START = re.compile(r"[\s\[]*")
# What small models write between the end of a call and the marker.
STRAY = re.compile(r"[\s,}\]]*")


class MarkedJsonParser(JsonToolParser):
    """JSON between markers. A list's brackets and commas may be missing, or be there for a single call."""

    blocks: ClassVar[Mapping[str, str]]
    """The opening markers, and the closing one of each: "" if there is none."""
    inside: ClassVar[tuple[str, str, str]] = ("[", ", ", "]")
    """The texts of a block before its first call, between two calls, and after the last one."""
    shares_block: ClassVar[bool] = True
    """All calls of an answer are in one block."""
    keys: ClassVar[tuple[str, str]] = ("name", "arguments")
    """The keys of the name and of the arguments."""

    @classmethod
    def call_rules(cls, tokens: Mapping[str, int]) -> CallRules:
        """See ToolParser."""
        [(opener, closer), *_] = cls.blocks.items()
        before, separator, after = map(json.dumps, cls.inside)
        block = f"{marked_rule(opener, cls.markers, tokens)} {before} {{}} {after}"
        if closer:
            block += f" {marked_rule(closer, cls.markers, tokens)}"
        call, around = ("tool", block) if cls.shares_block else (block.format("tool"), "{}")
        return CallRules(
            call, separator, lambda function, layout: json_call_rule(function, *cls.keys), around
        )

    @classmethod
    def write_calls(cls, calls: Sequence[Mapping[str, Any]]) -> str:
        """See ToolParser."""
        [(opener, closer), *_] = cls.blocks.items()
        before, separator, after = cls.inside
        name, arguments = cls.keys
        objects = [
            json.dumps({name: call["name"], arguments: call["arguments"]}, ensure_ascii=False)
            for call in calls
        ]
        blocks = [separator.join(objects)] if cls.shares_block else objects
        return "\n".join(f"{opener}{before}{block}{after}{closer}" for block in blocks)

    def __init__(self, tools: Tools, marker: Marker) -> None:
        super().__init__(tools, marker)
        self._closers = tuple(self.spell(closer, marker) for closer in self.blocks.values() if closer)

    def _openers(self) -> Mapping[str, Callable[[], bool]]:
        return dict.fromkeys(self.blocks, self._first)

    def _first(self) -> bool:
        """Read an object, or a list of them, after the marker."""
        return self._take_raw(START) and self._next_call()

    def _between(self) -> bool:
        """After a call: read the marker, or the next call; anything else is content."""
        self._at = STRAY.match(self._text, self._at).end()  # type: ignore[union-attr]
        if self._at == len(self._text):
            return False
        if self._text[self._at] == "{":
            return self._next_call()
        if self._accept_one(self._closers) is None:
            return False
        self._state = self._content
        return True
