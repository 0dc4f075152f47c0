"""Wrapping of streamed text: no word is broken, whatever pieces the text comes in."""

import pytest

from server.commands.word_wrap import WordWrap, columns


def wrapped(text: str, width: int, size: int = 1) -> str:
    """Return `text`, fed in pieces of `size` characters, as it is printed in `width` columns."""
    wrap = WordWrap(lambda: width)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return "".join(map(wrap.feed, pieces)) + wrap.end()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two three", "one two\nthree"),
        ("one two thr", "one two\nthr"),
        ("12345678901", "12345678901"),
        ("a 12345678901 b", "a\n12345678901 b"),
        ("1234567890 b", "1234567890\nb"),
        ("  indented line", "  indented\nline"),
        ("a\n\n  - b c\n", "a\n\n  - b c\n"),
        ("a\tb cd", "a\tb\ncd"),
        ("日本語日本語", "日本語日本\n語"),
        ("ab 日本語日本", "ab 日本語\n日本"),
        ("e\u0301e\u0301 abcdefg", "e\u0301e\u0301 abcdefg"),
        ("trailing ", "trailing"),
    ],
)
def test_lines_break_between_words(text: str, expected: str, size: int) -> None:
    assert wrapped(text, 10, size) == expected
    if not text.startswith("12345678901") and "12345678901" not in text:
        assert all(columns(line.expandtabs(8)) <= 10 for line in expected.split("\n"))


def test_the_width_may_change() -> None:
    width = 80
    wrap = WordWrap(lambda: width)
    out = wrap.feed("one two ")
    width = 9
    assert out + wrap.feed("three four ") == "one two\nthree\nfour"


def test_only_the_last_word_is_held_back() -> None:
    wrap = WordWrap(lambda: 80)
    assert [wrap.feed(piece) for piece in ("Hel", "lo wor", "ld", "!\n")] == ["", "Hello", "", " world!\n"]
    assert wrap.end() == ""
