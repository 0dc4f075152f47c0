"""Reads a call written as a JSON object, {"name": "f", "arguments": {…}}, incrementally."""

import json
import re
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol

from server.parsing.json_repair import JsonRepair
from server.parsing.parser import Marker, ToolParser, Tools

BLANKS = re.compile(r"[ \t\r\n]*")
BETWEEN = re.compile(r"[ \t\r\n,]*")
NAMES = frozenset(("name", "function", "tool_name"))
ARGUMENTS = frozenset(("arguments", "parameters"))
KEYS = NAMES | ARGUMENTS | {"type", "id", "index", "tool_call_id"}


class Sink(Protocol):
    """Receives a call; ToolParser is one."""

    def begin(self, name: str, call_id: str | None = None) -> bool: ...

    def arguments(self, text: str) -> None: ...

    def end(self) -> None: ...


class JsonCall:
    """One object. The call begins when its name and the start of its arguments are known.

    Until then reading is strict: a key outside KEYS, a name that is no string, or arguments that are no
    object make it fail. Arguments may also be an object in a string. After that JsonRepair reads on, up to
    the closing bracket or one of `ends`.
    """

    def __init__(self, sink: Sink, ends: str = "") -> None:
        self.has_begun = False
        self.has_failed = False
        self.is_done = False
        self._sink = sink
        self._ends = ends
        self._name: str | None = None
        self._key = ""
        self._writer = JsonRepair(ends)
        self._parts: list[str] = []  # of a key, or of a value that is used as a whole
        self._arguments: list[str] | None = None  # read before the name
        self._is_streaming = False
        self._state: Callable[[str, int], int] = self._open

    def feed(self, text: str, at: int) -> int:
        """Read `text` from offset `at`; return the offset after the object, or after the text."""
        while at < len(text) and not (self.is_done or self.has_failed):
            at = self._state(text, at)
        return at

    def close(self) -> None:
        """End the text: complete the call, if it has begun."""
        if not self.has_begun:
            self.has_failed = True
            return
        if self._is_streaming:
            self._sink.arguments(self._writer.close())
        self._finish()

    def _open(self, text: str, at: int) -> int:
        at = BLANKS.match(text, at).end()  # type: ignore[union-attr]
        if at < len(text):
            self.has_failed = text[at] != "{"
            self._state = self._key_or_end
            return at + (not self.has_failed)
        return at

    def _key_or_end(self, text: str, at: int) -> int:
        at = BETWEEN.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            return at
        if text[at] == '"':
            self._writer = JsonRepair(self._ends)
            self._state = self._read_key
        elif text[at] == "}":
            at += 1
            self._close_object()
        else:
            self._stop()
        return at

    def _read_key(self, text: str, at: int) -> int:
        part, at = self._writer.feed(text, at)
        self._parts.append(part)
        if self._writer.is_done:
            self._key = json.loads(self._take())
            if self._key in KEYS:
                self._state = self._colon
            else:
                self._stop()
        return at

    def _colon(self, text: str, at: int) -> int:
        at = BLANKS.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            return at
        if text[at] != ":":
            self._stop()
            return at
        self._state = self._value
        return at + 1

    def _value(self, text: str, at: int) -> int:
        """Choose by the first character of a value how to read it."""
        at = BLANKS.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            return at
        self._writer = JsonRepair(self._ends)
        self._state = self._whole_value
        if self._key in ARGUMENTS and not self.has_begun and self._arguments is None and text[at] == "{":
            self._arguments = []
            self._is_streaming = True
            self._state = self._stream_arguments
            self._begin()
        return at

    def _stream_arguments(self, text: str, at: int) -> int:
        part, at = self._writer.feed(text, at)
        if self.has_begun:
            self._sink.arguments(part)
        elif self._arguments is not None:
            self._arguments.append(part)
        if self._writer.is_done:
            self._is_streaming = False
            self._state = self._key_or_end
        return at

    def _whole_value(self, text: str, at: int) -> int:
        part, at = self._writer.feed(text, at)
        self._parts.append(part)
        if self._writer.is_done:
            self._state = self._key_or_end
            whole = self._take()
            if not self.has_begun:
                self._use(whole)
        return at

    def _use(self, value: str) -> None:
        """Use the JSON value of a key that was read before the call has begun."""
        if self._key in NAMES and self._name is None:
            if value.startswith('"'):
                self._name = json.loads(value)
                if self._arguments is not None:
                    self._begin()
            else:
                self.has_failed = True
        elif self._key in ARGUMENTS and self._arguments is None:
            self._arguments = [object_text(value)]
            self.has_failed = not self._arguments[0]
            if not self.has_failed:
                self._begin()

    def _begin(self) -> None:
        """Begin the call if its name is known, with the arguments read so far."""
        if self._name is None:
            return
        if self._sink.begin(self._name):
            self.has_begun = True
            self._sink.arguments("".join(self._arguments or ()))
        else:
            self.has_failed = True

    def _close_object(self) -> None:
        if not self.has_begun:
            self._arguments = self._arguments or ["{}"]
            self._begin()
        if self.has_begun:
            self._finish()
        else:
            self.has_failed = True

    def _finish(self) -> None:
        self._sink.end()
        self.is_done = True

    def _stop(self) -> None:
        """Stop at unexpected text: it ends a call that has begun, and fails otherwise."""
        if self.has_begun:
            self._finish()
        else:
            self.has_failed = True

    def _take(self) -> str:
        whole = "".join(self._parts)
        self._parts.clear()
        return whole


def object_text(value: str) -> str:
    """Return arguments that are a JSON string or null as the text of an object; "" if they are none."""
    if value == "null":
        return "{}"
    try:
        text = json.loads(value) or "{}"
        is_object = isinstance(json.loads(text), dict) and text.encode()
    except (
        ValueError,
        TypeError,
        RecursionError,
    ):  # no string, no JSON, a lone surrogate, a huge number
        return ""
    return text if is_object else ""


class JsonToolParser(ToolParser):
    """Base of formats whose calls are JSON objects; a malformed one ends at one of the characters `ends`."""

    ends: ClassVar[str] = ""

    def __init__(self, tools: Tools, marker: Marker) -> None:
        super().__init__(tools, marker)
        self._call = JsonCall(self)

    def _next_call(self) -> bool:
        """Expect a call."""
        self._call = JsonCall(self, self.ends)
        self._state = self._in_call
        return True

    def _in_call(self) -> bool:
        start = self._at
        self._at = self._call.feed(self._text, start)
        if not self._call.has_begun:
            self._raw.append(self._text[start : self._at])
        if self._call.has_failed:
            return self._no_call()
        if self._call.is_done:
            self._state = self._between
        return True

    @abstractmethod
    def _between(self) -> bool:
        """Read what follows a call."""

    def _take_raw(self, pattern: re.Pattern[str]) -> bool:
        """Consume what `pattern` matches as part of a call; return True if any text is left."""
        found = pattern.match(self._text, self._at)
        if found is not None:
            self._raw.append(found[0])
            self._at = found.end()
        return self._at < len(self._text)

    def _close_call(self) -> None:
        self._call.close()
