"""Reads JSON whose strings are between markers in place of quotes: {city:<escape>Rome<escape>,days:2}."""

import json

from engine.control_tokens import until
from server.parsing.json_repair import JsonRepair
from server.parsing.parser import num_begun

# A control token ends the value, even inside a string.
UNMARKED = until("")


class QuotedJson(JsonRepair):
    """Writes the value as JSON. Text between two markers `quote` is a string; JsonRepair reads the rest."""

    def __init__(self, quote: str) -> None:
        super().__init__()
        self._quote_marker = quote
        self._is_quoted = False
        self._held = ""  # of the text, where it may begin a marker

    def feed(self, text: str, at: int = 0) -> tuple[str, int]:
        """See JsonRepair; text that may begin a marker is held back."""
        num_held, text = len(self._held) - at, self._held + text[at:]
        self._held = ""
        out: list[str] = []
        place = 0
        while place < len(text) and not self.is_done:
            end = text.find(self._quote_marker, place)
            is_marker = end >= 0
            if not is_marker:
                end = len(text) - num_begun(text, place, (self._quote_marker,))
            place, parts = self._read(text, place, end)
            out += parts
            if self.is_done or place < end:
                continue
            if not is_marker:
                self._held, place = text[end:], len(text)
                break
            out.append(super().feed('"')[0])
            self._is_quoted = not self._is_quoted
            place = end + len(self._quote_marker)
        return "".join(out), place - num_held

    def close(self) -> str:
        """See JsonRepair."""
        held, self._held = self._held, ""
        _, parts = self._read(held, 0, len(held))
        return "".join(parts) + super().close()

    def _read(self, text: str, place: int, end: int) -> tuple[int, list[str]]:
        """Read up to `end`, where a marker may be; return the offset where reading stopped, and the JSON."""
        if not self._is_quoted:
            part, stop = super().feed(text[:end], place)
            return stop, [part]
        stop = UNMARKED.match(text, place, end).end()  # type: ignore[union-attr]
        parts = [super().feed(json.dumps(text[place:stop], ensure_ascii=False)[1:-1])[0]]
        if stop < end:
            parts.append(super().close())
        return stop, parts
