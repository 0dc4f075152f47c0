"""Keys of the prefix cache: token ids, with numbers of their content in place of placeholder tokens."""

from array import array

from engine.schedule.sequence import Sequence

MAX_CONTENTS = 65_536  # about 10 MB of hashes


class PrefixKeys:
    """Gives each content of prompt spans a negative number, which no token id has.

    Numbers are never used twice. At MAX_CONTENTS all numbers are dropped: the cached pages with that content
    are not found any more, and evicted like others.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, bytes], int] = {}
        self._last_number = 0

    def key(self, sequence: Sequence) -> "array[int]":
        """Return the key of a sequence's tokens, one int each: its `token_ids` themselves without spans."""
        spans = sequence.request.spans
        if not spans:
            return sequence.token_ids
        key = sequence.token_ids[:]
        for span in spans:
            number = self._number(span.kind, span.content_hash)
            key[span.start : span.end] = array("i", [number]) * (span.end - span.start)
        return key

    def _number(self, kind: str, content_hash: bytes) -> int:
        content = kind, content_hash
        if content not in self._numbers:
            if len(self._numbers) >= MAX_CONTENTS:
                self._numbers.clear()
            self._last_number -= 1
            self._numbers[content] = self._last_number
        return self._numbers[content]
