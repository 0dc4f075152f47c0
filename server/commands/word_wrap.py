"""Wraps text that arrives in pieces, so that no word is broken at a terminal's right margin."""

from collections.abc import Callable

TAB = 8


class WordWrap:
    """Text in, text with line breaks out. The last word is held back until it is known to be whole.

    A word that is longer than a line is left to the terminal. Wide characters (Chinese, Japanese, Korean) may
    be broken anywhere, as usual. `width` returns the columns of the terminal.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._spaces = ""
        self._word = ""

    def feed(self, text: str) -> str:
        """Return what can be printed now."""
        out = ""
        for character in text:
            if character == "\n":
                out += self._flush() + "\n"
                self._column, self._spaces = 0, ""
            elif character in " \t":
                out += self._flush()
                self._spaces += character
            elif columns(character) == 2:
                out += self._flush()
                self._word = character
                out += self._flush()
            else:
                self._word += character
        return out

    def end(self) -> str:
        """Return the word that is left."""
        return self._flush()

    def _flush(self) -> str:
        """Return the held back word with the spaces before it, or after a line break without them."""
        if not self._word:
            return ""
        end = self._column
        for space in self._spaces:
            end += TAB - end % TAB if space == "\t" else 1
        size = columns(self._word)
        before = self._spaces
        if self._column and end + size > self._width():
            before, end = "\n", 0
        out = before + self._word
        self._column = (end + size) % max(1, self._width()) if end + size > self._width() else end + size
        self._spaces = self._word = ""
        return out


def columns(text: str) -> int:
    """Return the columns that a text takes in a terminal; at least 0."""
    from wcwidth import wcswidth  # needed on a terminal only

    return max(0, int(wcswidth(text)))
