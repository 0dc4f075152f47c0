"""Output tokens of the engine -> the logprobs and token ids of an answer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.outputs import OutputToken, TokenPiece
from server.schema.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

# JSON has no -inf; this is the number that vLLM writes.
LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """Which details of its tokens an answer has, and how it spells them.

    `num_logprobs` and `num_prompt_logprobs`: top logprobs at each position of the answer and of the prompt;
    None: no logprobs at all. `has_ids` adds token ids, `ids_as_text` spells tokens as `token_id:7`.
    """

    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    has_ids: bool = False
    ids_as_text: bool = False

    def __bool__(self) -> bool:
        return self.num_logprobs is not None or self.has_ids

    def ids(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        """Return the field with the ids of all sampled tokens, shown or not, if the answer has it."""
        return {"token_ids": [token.piece.token_id for token in tokens]} if self.has_ids else {}

    def chat(self, tokens: Sequence[OutputToken]) -> ChatLogprobs | None:
        """Return the logprobs of `tokens` but those that ended the answer, if the answer has them."""
        if self.num_logprobs is None:
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
            if token.is_listed
        ]
        return ChatLogprobs(content=content, refusal=None)

    def completion(
        self,
        tokens: Sequence[OutputToken],
        echoed: Sequence[OutputToken] = (),
        num_echoed_chars: int = 0,
    ) -> CompletionLogprobs | None:
        """Return the logprobs of `tokens` but those that ended the answer, if the answer has them.

        They follow the `echoed` tokens of the prompt, and offsets count its characters.
        """
        if self.num_logprobs is None:
            return None
        listed = [token for token in tokens if token.is_listed]
        all_tokens = [*echoed, *listed]
        return CompletionLogprobs(
            text_offset=[
                *(token.offset for token in echoed),
                *(num_echoed_chars + token.offset for token in listed),
            ],
            token_logprobs=[None if token.logprob is None else finite(token.logprob) for token in all_tokens],
            tokens=[self._text(token.piece, "bytes:") for token in all_tokens],
            top_logprobs=[self._top_logprobs(token, self.num_logprobs) for token in all_tokens],
        )

    def prompt(self, tokens: Sequence[OutputToken]) -> PromptLogprobs | None:
        """Return the candidates at each position of a prompt, if the answer has them."""
        if self.num_prompt_logprobs is None:
            return None
        return [self._candidates(token, self.num_prompt_logprobs) for token in tokens]

    def _text(self, piece: TokenPiece, if_bytes: str = "") -> str:
        """Return the text of a token; incomplete characters as OpenAI writes bytes, after `if_bytes`."""
        if self.ids_as_text:
            return f"token_id:{piece.token_id}"
        try:
            return piece.data.decode()
        except UnicodeDecodeError:
            return if_bytes + piece.data.decode("utf-8", "backslashreplace")

    def _top_logprobs(self, token: OutputToken, num_top: int) -> dict[str, float] | None:
        """Return the logprobs of the most likely tokens and of the actual one, by text."""
        if token.logprob is None:
            return None
        places = {self._text(piece, "bytes:"): finite(logprob) for piece, logprob in token.top[:num_top]}
        places.setdefault(self._text(token.piece, "bytes:"), finite(token.logprob))
        return places

    def _candidates(self, token: OutputToken, num_top: int) -> dict[str, PromptLogprob] | None:
        """Return the most likely tokens and the actual one by token id, with ranks."""
        if token.logprob is None:
            return None
        found = {
            str(piece.token_id): self._candidate(piece, logprob, rank)
            for rank, (piece, logprob) in enumerate(token.top[:num_top], 1)
        }
        if (own := str(token.piece.token_id)) not in found:
            assert token.rank is not None, "tokens of a prompt have their ranks"
            found[own] = self._candidate(token.piece, token.logprob, token.rank)
        return found

    def _candidate(self, piece: TokenPiece, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=self._text(piece))


NO_DETAILS = TokenDetails()


def finite(logprob: float) -> float:
    """Return a logprob as a number that JSON can write."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def mean_logprob(tokens: Sequence[OutputToken]) -> float:
    """Return the mean logprob of an answer's tokens, shown or not; -inf without tokens."""
    logprobs = [token.logprob for token in tokens if token.logprob is not None]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf
