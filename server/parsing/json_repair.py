"""Repairs the JSON that models write, incrementally.

Strict JSON passes unchanged, byte for byte. From any other text the result is valid JSON, too: what has been
sent cannot be taken back, and a client must be able to read it.
"""

import json
import re
from collections.abc import Callable

from engine.control_tokens import is_marked, until

# Characters of a string that need no treatment.
RUN = until(r"\"'\\\x00-\x1f")
BLANKS = re.compile(r"[ \t\r\n]*")
NO_BLANK = re.compile(r"[^ \t\r\n]+")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
ESCAPES = frozenset('"\\/bfnrt')
HEX = frozenset("0123456789abcdefABCDEF")
OPENER = {"}": "{", "]": "[", ")": "["}
CLOSER = {"{": "}", "[": "]"}
# The depth that the arguments of a call may have when a client sends them back.
MAX_DEPTH = 64


class JsonRepair:
    """Reads one value, JSON or a Python literal, and writes it as JSON.

    It accepts single quotes, tuples, True, False, None and `\\xhh`, and repairs the most frequent faults:
    control characters and bad escapes in strings are escaped, unquoted words become strings, missing commas
    are added and trailing ones dropped, missing values are null, open brackets are closed.

    The value ends where it is complete, before one of `ends`, before a closing bracket without an opening
    one, or before the 65th nested bracket. A control token ends it even inside a string. Linear in the text.
    """

    def __init__(self, ends: str = "") -> None:
        self.is_done = False
        self._ends = frozenset(ends)
        self._key_word = until(rf"\s:=,{{}}\[\]()\"'{re.escape(ends)}")
        self._bare_word = until(rf"\r\n,}}\])\"{re.escape(ends)}")
        self._out: list[str] = []
        self._stack: list[str] = []
        self._state: Callable[[str, int], int] = self._value
        self._gap: list[str] = []  # whitespace and a comma, held until the next item
        self._has_comma = False
        self._has_items = False
        self._is_key = False
        self._quote = ""
        self._parts: list[str] = []  # of an escape or of a word, until it is complete

    def feed(self, text: str, at: int = 0) -> tuple[str, int]:
        """Read `text` from offset `at`; return the JSON it adds, and the offset where reading stopped."""
        while at < len(text) and not self.is_done:
            at = self._state(text, at)
        return self._take(), at

    def close(self) -> str:
        """End the text; return the JSON that completes the value."""
        if not self.is_done:
            self._end()
        return self._take()

    def _is_end(self, char: str) -> bool:
        """Return True if `char` ends the value wherever it is."""
        return char in self._ends or is_marked(char)

    def _take(self) -> str:
        out = "".join(self._out)
        self._out.clear()
        return out

    def _value(self, text: str, at: int) -> int:
        """Expect a value: the whole, or the one after a colon."""
        end = BLANKS.match(text, at).end()  # type: ignore[union-attr]
        if end > at:
            if self._stack:
                self._out.append(text[at:end])
            return end
        char = text[at]
        if self._is_end(char) or char in ",}])":
            self._out.append("null")
            self._ended()
            return at
        if char in ":=":
            return at + 1
        return self._begin(char, at)

    def _begin(self, char: str, at: int) -> int:
        if char in "\"'":
            self._out.append('"')
            self._quote = char
            self._state = self._string
            return at + 1
        if char in "{[(":
            if len(self._stack) == MAX_DEPTH:
                self._end()
                return at
            opener = "{" if char == "{" else "["
            self._out.append(opener)
            self._stack.append(opener)
            self._has_items = False
            self._state = self._item
            return at + 1
        self._state = self._word
        return at

    def _item(self, text: str, at: int) -> int:
        """Expect an item, a comma or a closing bracket."""
        end = BLANKS.match(text, at).end()  # type: ignore[union-attr]
        if end > at:
            self._gap.append(text[at:end])
            return end
        char = text[at]
        if self._is_end(char):
            self._end()
            return at
        if char in "}])":
            return self._close(char, at)
        if char == ",":
            if self._has_items and not self._has_comma:
                self._has_comma = True
                self._gap.append(",")
            return at + 1
        is_key = self._stack[-1] == "{"
        if is_key and char in "{[(:=":
            return at + 1
        self._is_key = is_key
        if self._has_items and not self._has_comma:
            self._out.append(",")
        self._out += self._gap
        self._clear_gap()
        return self._begin(char, at)

    def _close(self, char: str, at: int) -> int:
        """Close a bracket, and those opened inside it."""
        opener = OPENER[char]
        if opener not in self._stack:
            self._end()
            return at
        self._drop_comma()
        while True:
            top = self._stack.pop()
            self._out.append(CLOSER[top])
            if top == opener:
                break
        self._ended()
        return at + 1

    def _drop_comma(self) -> None:
        self._out += (part for part in self._gap if part != ",")
        self._clear_gap()

    def _clear_gap(self) -> None:
        self._gap.clear()
        self._has_comma = False

    def _colon(self, text: str, at: int) -> int:
        end = BLANKS.match(text, at).end()  # type: ignore[union-attr]
        self._out.append(text[at:end])
        if end == len(text):
            return end
        self._out.append(":")
        self._state = self._value
        return end + 1 if text[end] in ":=" else end

    def _string(self, text: str, at: int) -> int:
        if (end := RUN.match(text, at).end()) > at:  # type: ignore[union-attr]
            self._out.append(text[at:end])
            return end
        char = text[at]
        if char == self._quote:
            self._out.append('"')
            self._ended()
        elif is_marked(char):
            self._end()
            return at
        elif char == "\\":
            self._state = self._escape
        elif char == "'":
            self._out.append(char)
        else:
            self._out.append(json.dumps(char)[1:-1])
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        """Read an escape; a backslash that begins none is text."""
        char = text[at]
        if self._parts:
            length = {"u": 5, "x": 3}[self._parts[0]]
            if char not in HEX:
                self._end_escape()
                return at
            self._parts.append(char)
            if len(self._parts) == length:
                digits = "".join(self._parts[1:])
                self._out.append("\\u" + digits.rjust(4, "0"))
                self._parts.clear()
                self._state = self._string
            return at + 1
        if char in "ux":
            self._parts.append(char)
            return at + 1
        if char in ESCAPES or char == "'":
            self._out.append(char if char == "'" else "\\" + char)
            self._state = self._string
            return at + 1
        self._end_escape()
        return at

    def _end_escape(self) -> None:
        self._out.append("\\\\" + "".join(self._parts))
        self._parts.clear()
        self._state = self._string

    def _word(self, text: str, at: int) -> int:
        """Read a number, a name such as true, or unquoted words; only a key ends at whitespace."""
        word = self._key_word if self._is_key else self._bare_word
        end = word.match(text, at).end()  # type: ignore[union-attr]
        self._parts.append(text[at:end])
        if end < len(text):
            self._end_word()
        return end

    def _end_word(self) -> None:
        token = "".join(self._parts)
        self._parts.clear()
        word = token.rstrip()
        if self._is_key:
            self._out.append(json.dumps(word, ensure_ascii=False))
        elif NUMBER.fullmatch(word):
            self._out.append(word)
        else:
            self._out.append(WORDS.get(word) or json.dumps(word, ensure_ascii=False))
        self._ended()
        if self._stack and self._state == self._item:
            self._gap.append(NO_BLANK.sub("", token[len(word) :]))

    def _ended(self) -> None:
        """Continue after a complete key or value."""
        if self._is_key:
            self._is_key = False
            self._state = self._colon
        elif not self._stack:
            self.is_done = True
        else:
            self._has_items = True
            self._state = self._item

    def _end(self) -> None:
        """Complete the value from any state."""
        if self._state == self._escape:
            self._end_escape()
        if self._state == self._string:
            self._out.append('"')
            self._ended()
        elif self._state == self._word:
            self._end_word()
        if self._state == self._colon:
            self._out.append(":")
            self._state = self._value
        if self._state == self._value and not self.is_done:
            self._out.append("null")
        self._drop_comma()
        self._out += (CLOSER[opener] for opener in reversed(self._stack))
        self._stack.clear()
        self.is_done = True
