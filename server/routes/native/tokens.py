"""Splits the text of an answer into the parts of its tokens."""

from collections.abc import Iterator, Sequence

from engine.outputs import OutputToken
from server.answer import Delta

# A token and its part of the text, None if it leaves none.
TokenText = tuple[OutputToken, str | None]


class TokenTexts:
    """The tokens of one answer, while its deltas come in. Text that comes before its token waits for it."""

    def __init__(self) -> None:
        self.waiting = ""
        self._num_chars = 0

    def take(self, delta: Delta) -> list[TokenText]:
        """The tokens of a delta; what is shown of them is, joined, the text so far."""
        self.waiting += delta.text
        if not delta.tokens:
            return []
        text, self.waiting = self.waiting, ""
        pairs = list(self._split(delta.tokens, text))
        self._num_chars += len(text)
        return pairs

    def _split(self, tokens: Sequence[OutputToken], text: str) -> Iterator[TokenText]:
        shown = [token for token in tokens if token.is_shown]
        ends = iter([*(token.offset - self._num_chars for token in shown[1:]), len(text)])
        start = 0
        for token in tokens:
            part = None
            if token.is_shown:
                end = next(ends)
                part, start = text[start:end], end
            yield token, part
