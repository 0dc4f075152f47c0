"""The bytes behind a token id: what a single token stands for, be it half a character."""

import json
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from engine.outputs import TokenPiece

MAX_KNOWN_PIECES = 65536


def _byte_of_char() -> dict[str, int]:
    """The alphabet in which byte-level tokenizers spell bytes (GPT-2: printable ones are themselves)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()


class TokenPieces:
    """Looks up pieces in a `tokenizers.Tokenizer`, by what its decoder does to a single token.

    Byte-level decoders spell bytes as characters; the others have `<0xE2>` for a byte (byte fallback) and a
    mark for a space.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._added = {
            token_id: (token.content.encode(), token.special)
            for token_id, token in backend.get_added_tokens_decoder().items()
        }
        self._is_byte_level = False
        self._has_byte_fallback = False
        self.strips_first_space = False  # a tokenizer that puts a space in front of a text
        self._replacements: list[tuple[str, str]] = []
        if backend.decoder is not None:
            self._read(json.loads(backend.decoder.__getstate__()))
        # Kept: streams that tell their tokens ask for the same few over and over.
        self.piece = lru_cache(MAX_KNOWN_PIECES)(self._look_up)

    @cached_property
    def by_bytes(self) -> tuple[list[bytes], np.ndarray]:
        """The bytes of all tokens but control tokens, sorted, and their ids, int64 [n].

        Looking at a large vocabulary takes half a second the first time: not on the loop.
        """
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        pieces = sorted(
            (self._added[token_id][0] if token_id in self._added else self._bytes(token), token_id)
            for token, token_id in vocab.items()
            if not self.is_special(token_id)
        )
        ids = np.array([token_id for _, token_id in pieces], np.int64)
        return [data for data, _ in pieces], ids

    def is_special(self, token_id: int) -> bool:
        """Whether this is a control token, which `skip_special_tokens` hides."""
        return token_id in self._added and self._added[token_id][1]

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
        if self._is_byte_level and all(char in BYTE_OF_CHAR for char in token):
            return bytes(BYTE_OF_CHAR[char] for char in token)
        if self._has_byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        for mark, text in self._replacements:
            token = token.replace(mark, text)
        return token.encode()
