"""Looks up the bytes of a token id, which may be part of a character."""

import codecs
import json
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from engine.outputs import TokenPiece

MAX_KNOWN_PIECES = 65536
# Decoders write this for bytes that are no character.
REPLACEMENT = "\ufffd"
# A character has at most four bytes.
MAX_UNFINISHED_BYTES = 3


class _Alphabet(dict[int, int]):
    """The alphabet of byte-level tokenizers (GPT-2), where printable bytes of Latin-1 are themselves.

    For str.translate: maps a character to its byte, and any other character to 0x100, which is no byte.
    """

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        super().__init__({byte: byte for byte in printable})
        self.update((256 + place, byte) for place, byte in enumerate(others))

    def __missing__(self, char: int) -> int:
        return 0x100


ALPHABET = _Alphabet()


class TokenPieces:
    """The pieces of a `tokenizers.Tokenizer`, as its decoder turns single tokens into bytes.

    Byte-level decoders spell bytes as characters; others have `<0xE2>` for a byte (byte fallback) and a
    marker for a space. `by_bytes` holds the bytes of all tokens but control tokens, sorted, and their ids,
    int64 [n]. Sorting takes 0.2 s for 49,000 tokens, so create this at start-up, and not on the loop.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._added = {
            token_id: (token.content.encode(), token.special)
            for token_id, token in backend.get_added_tokens_decoder().items()
        }
        self._added_ids = {data.decode(): token_id for token_id, (data, _) in self._added.items()}
        self._is_byte_level = False
        self._has_byte_fallback = False
        self.strips_first_space = False  # the tokenizer puts a space in front of a text
        self._replacements: list[tuple[str, str]] = []
        if backend.decoder is not None:
            self._read(json.loads(backend.decoder.__getstate__()))
        # Streams that return their tokens look up the same few again and again.
        self.piece = lru_cache(MAX_KNOWN_PIECES)(self._look_up)
        self.by_bytes = self._sort(backend.get_vocab(with_added_tokens=True))

    def _sort(self, vocab: dict[str, int]) -> tuple[list[bytes], np.ndarray]:
        found = [(token, token_id) for token, token_id in vocab.items() if not self.is_special(token_id)]
        pieces = [
            self._added[token_id][0] if token_id in self._added else self._bytes(token)
            for token, token_id in found
        ]
        order = sorted(range(len(found)), key=pieces.__getitem__)
        return [pieces[place] for place in order], np.array([found[place][1] for place in order], np.int64)

    def is_special(self, token_id: int) -> bool:
        """Return True for a control token, which `skip_special_tokens` hides."""
        return token_id in self._added and self._added[token_id][1]

    def added_tokens(self, texts: Iterable[str]) -> dict[int, str]:
        """Return those of `texts` that an added token has, special or not, by its id."""
        return {self._added_ids[text]: text for text in texts if text in self._added_ids}

    def settled(self, token_ids: list[int], text: str, *, skip_special_tokens: bool) -> str:
        """Return `text`, decoded from `token_ids`, without a last character that later tokens may complete.

        Replacement characters for bytes that cannot begin a character are kept.
        """
        if not text.endswith(REPLACEMENT):
            return text
        data, places = b"", []
        for place in reversed(range(len(token_ids))):
            if len(data) >= MAX_UNFINISHED_BYTES:
                break
            if not (skip_special_tokens and self.is_special(token_ids[place])):
                data = self.piece(token_ids[place]).data + data
                places.append(place)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(data)
        num_bytes = len(decoder.getstate()[0])
        if not num_bytes:
            return text
        if not self._has_byte_fallback:
            return text[:-1]
        # Each byte is a token, and a run of bytes decodes to replacement characters while its end is
        # incomplete.
        rest = token_ids[: places[num_bytes - 1]]
        return str(self._backend.decode(rest, skip_special_tokens=skip_special_tokens))

    def _read(self, decoder: dict[str, Any]) -> None:
        kind = decoder["type"]
        if kind == "Sequence":
            for part in decoder["decoders"]:
                self._read(part)
        elif kind == "ByteLevel":
            self._is_byte_level = True
        elif kind == "ByteFallback":
            self._has_byte_fallback = True
        elif kind == "Strip":
            self.strips_first_space = decoder["content"] == " " and decoder["start"] > 0
        elif kind == "Metaspace":
            self.strips_first_space = decoder["prepend_scheme"] != "never"
            self._replacements.append((decoder["replacement"], " "))
        elif kind == "Replace" and "String" in decoder["pattern"]:
            self._replacements.append((decoder["pattern"]["String"], decoder["content"]))

    def _look_up(self, token_id: int) -> TokenPiece:
        if token_id in self._added:
            return TokenPiece(token_id, *self._added[token_id])
        return TokenPiece(token_id, self._bytes(self._backend.id_to_token(token_id) or ""), False)

    def _bytes(self, token: str) -> bytes:
        if self._is_byte_level:
            with suppress(UnicodeEncodeError):  # a token that is not spelled in bytes
                return token.translate(ALPHABET).encode("latin-1")
        if self._has_byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        for mark, text in self._replacements:
            token = token.replace(mark, text)
        return token.encode()


def is_continuation(byte: int) -> bool:
    """Return True for a byte of UTF-8 that continues a character."""
    return byte & 0xC0 == 0x80
