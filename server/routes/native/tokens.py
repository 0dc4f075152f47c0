"""Tokens that are told one by one, each with its part of the text."""

from collections.abc import Iterator, Sequence

from engine.outputs import OutputToken
from server.answer import Delta

# None: it leaves no text.
Told = tuple[OutputToken, str | None]


class TokenTexts:
    """The tokens of one answer, while its deltas come in. Text that comes before its token waits for it."""

    def __init__(self) -> None:
        self.waiting = ""
        self._num_chars = 0

    def take(self, delta: Delta) -> list[Told]:
        """The tokens of a delta; what is shown of them is, joined, the text so far."""
        self.waiting += delta.text
        if not delta.tokens:
            return []
        text, self.waiting = self.waiting, ""
        told = list(self._split(delta.tokens, text))
        self._num_chars += len(text)
        return told

    def _split(self, tokens: Sequence[OutputToken], text: str) -> Iterator[Told]:
        shown = [token for token in tokens if token.is_shown]
        ends = iter([*(token.offset - self._num_chars for token in shown[1:]), len(text)])
        start = 0
        for token in tokens:
            part = None
            if token.is_shown:
                end = next(ends)
                part, start = text[start:end], end
            yield token, part
