"""Tokens the engine tells -> the log-probabilities and token ids of an answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.outputs import OutputToken, TokenPiece
from server.schema.logprobs import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

# JSON has no -inf. vLLM's number for it, so that clients meet the same.
LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """What an answer says about its tokens, and how.

    `has_logprobs` says whether it has log-probabilities, `has_ids` token ids; `ids_as_text` spells tokens as
    `token_id:7`.
    """

    has_logprobs: bool = False
    has_ids: bool = False
    ids_as_text: bool = False

    def __bool__(self) -> bool:
        return self.has_logprobs or self.has_ids

    def ids(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        """The field with the ids of all sampled tokens, shown or not, if they are wanted."""
        return {"token_ids": [token.piece.token_id for token in tokens]} if self.has_ids else {}

    def chat(self, tokens: Sequence[OutputToken]) -> ChatLogprobs | None:
        """Log-probabilities of the shown ones of `tokens`, if they are wanted."""
        if not self.has_logprobs:
            return None
        content = [
            TokenLogprob(
                token=self._text(token.piece),
                logprob=finite(token.logprob or 0.0),
                bytes=list(token.piece.data),
                top_logprobs=[
                    TopLogprob(token=self._text(piece), logprob=finite(logprob), bytes=list(piece.data))
                    for piece, logprob in token.top
                ],
            )
            for token in tokens
            if token.is_shown
        ]
        return ChatLogprobs(content=content, refusal=None)

    def completion(self, tokens: Sequence[OutputToken]) -> CompletionLogprobs | None:
        """Log-probabilities of the shown ones of `tokens`, if they are wanted."""
        if not self.has_logprobs:
            return None
        shown = [token for token in tokens if token.is_shown]
        return CompletionLogprobs(
            text_offset=[token.offset for token in shown],
            token_logprobs=[None if token.logprob is None else finite(token.logprob) for token in shown],
            tokens=[self._text(token.piece, "bytes:") for token in shown],
            top_logprobs=[self._places(token) for token in shown],
        )

    def _text(self, piece: TokenPiece, if_bytes: str = "") -> str:
        """The text of a token; bytes that are no character as OpenAI writes them, after `if_bytes`."""
        if self.ids_as_text:
            return f"token_id:{piece.token_id}"
        try:
            return piece.data.decode()
        except UnicodeDecodeError:
            return if_bytes + piece.data.decode("utf-8", "backslashreplace")

    def _places(self, token: OutputToken) -> dict[str, float] | None:
        """The most likely tokens and the one that stands there, which may be none of them."""
        if token.logprob is None:
            return None
        places = {self._text(piece, "bytes:"): finite(logprob) for piece, logprob in token.top}
        places.setdefault(self._text(token.piece, "bytes:"), finite(token.logprob))
        return places


NO_DETAILS = TokenDetails()


def finite(logprob: float) -> float:
    """A number that JSON can write."""
    return max(logprob, LOWEST_LOGPROB)
