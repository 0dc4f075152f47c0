"""Keeps the tokens of a stream until the text they became is delivered, for streams that return tokens."""

from collections import deque
from typing import NamedTuple

from engine.outputs import OutputToken, PromptLogprobColumns, TokenLogprobs
from engine.text.token_bytes import TokenPieces, is_continuation


class _Waiting(NamedTuple):
    """A token, and the number of delivered characters after which it is delivered."""

    token: OutputToken
    end: int


class TokenLog:
    """The tokens of one stream that are not delivered yet.

    A token is delivered with the text that contains its last byte: text that is held back (it may begin a
    stop string, a character is incomplete) holds back its tokens, too. Characters count from the stream's
    first one; if the prompt ends `is_inside_character`, that is the character its last bytes began.
    """

    def __init__(
        self, pieces: TokenPieces, *, skip_special_tokens: bool, is_inside_character: bool = False
    ) -> None:
        self._pieces = pieces
        self._is_inside_character = is_inside_character
        self._skip_special_tokens = skip_special_tokens
        self._coming: deque[tuple[int, TokenLogprobs | None]] = deque()
        self._waiting: deque[_Waiting] = deque()
        self._num_chars = 0
        self._num_left = 0
        self._prompt: list[OutputToken] = []
        self._num_prompt_chars = 0
        self._strips_space = pieces.strips_first_space

    def add_prompt_tokens(self, token_ids: tuple[int, ...], scores: PromptLogprobColumns | None) -> None:
        """Add the next tokens of the prompt. None are held back, so their characters are counted here."""
        logprobs = (None,) * len(token_ids) if scores is None else scores.each()
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            is_hidden = self._skip_special_tokens and self._pieces.is_special(token_id)
            data = b"" if is_hidden else self._pieces.piece(token_id).data
            if data and self._strips_space:
                data, self._strips_space = data.removeprefix(b" "), False
            # The rest of a character that was counted already belongs to it.
            offset = self._num_prompt_chars - (data[:1] != b"" and is_continuation(data[0]))
            self._prompt.append(self._output_token(token_id, logprob, max(0, offset), is_shown=not is_hidden))
            self._num_prompt_chars += sum(not is_continuation(byte) for byte in data)

    def take_prompt(self) -> tuple[OutputToken, ...]:
        """Return the tokens of the prompt and forget them."""
        prompt, self._prompt = tuple(self._prompt), []
        return prompt

    def expect(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Add tokens that will be decoded next, in order, with or without their log-probabilities."""
        self._coming.extend(zip(token_ids, logprobs or (None,) * len(token_ids), strict=True))

    def decoded(self, num_chars: int, *, is_whole: bool) -> None:
        """Note that the next token is decoded: `num_chars` more are final, with `is_whole` all of its own."""
        token_id, logprobs = self._coming.popleft()
        is_hidden = self._skip_special_tokens and self._pieces.is_special(token_id)
        offset = self._num_chars
        if self._is_inside_character and num_chars and not is_hidden:
            offset += self._num_marks(token_id, num_chars)
        self._is_inside_character = not is_whole
        token = self._output_token(token_id, logprobs, offset, is_shown=not is_hidden)
        token = token._replace(is_hidden=is_hidden)
        self._num_chars += num_chars
        self._waiting.append(_Waiting(token, self._num_chars if is_whole else self._num_chars + 1))

    def _num_marks(self, token_id: int, num_chars: int) -> int:
        """Return how many of `num_chars` new characters come from bytes of earlier tokens."""
        data = self._pieces.piece(token_id).data
        if not data or is_continuation(data[0]):
            return 0
        return max(0, num_chars - len(data.decode(errors="ignore")))

    def settled(self, num_chars: int) -> None:
        """Note that bytes of earlier tokens which never became a character are shown as `num_chars`."""
        self._num_chars += num_chars
        self._is_inside_character = False

    def leave(self, num_chars: int) -> tuple[OutputToken, ...]:
        """Return the tokens that are delivered with the next `num_chars` characters."""
        self._num_left += num_chars
        left = []
        while self._waiting and self._waiting[0].end <= self._num_left:
            left.append(self._waiting.popleft().token)
        return tuple(left)

    def end(self, num_chars: int, *, is_cut: bool, hides_last: bool) -> tuple[OutputToken, ...]:
        """Return all remaining tokens, delivered with the last `num_chars` characters.

        If the text `is_cut` at a stop string, tokens after the cut are not shown; neither is the last token
        if it only ended the stream.
        """
        self._num_left += num_chars
        tokens = []
        for token, end in self._waiting:
            is_after_cut = is_cut and self._num_left < min(end, token.offset + 1)
            tokens.append(token._replace(is_shown=False, is_hidden=False) if is_after_cut else token)
        if hides_last and self._coming:
            tokens.append(self._output_token(*self._coming.popleft(), self._num_chars, is_shown=False))
        return tuple(tokens)

    def _output_token(
        self, token_id: int, logprobs: TokenLogprobs | None, offset: int, *, is_shown: bool
    ) -> OutputToken:
        piece = self._pieces.piece
        if logprobs is None:
            return OutputToken(piece(token_id), offset, None, (), is_shown)
        top = tuple((piece(other), value) for other, value in logprobs.top)
        return OutputToken(piece(token_id), offset, logprobs.logprob, top, is_shown, logprobs.rank)
