"""TGI's answers: text as a string; the last event of a stream has all of it."""

from collections.abc import Iterator

from pydantic import BaseModel

from engine.errors import InvalidRequest
from engine.outputs import OutputToken, TokenPiece
from server.answer import Answer, Delta, finish_of
from server.errors import native_envelope
from server.logprobs import finite
from server.routes.native.convert import Defaults
from server.schema.native import (
    GenerateRequest,
    TgiDetails,
    TgiEvent,
    TgiPrefillToken,
    TgiReason,
    TgiResponse,
    TgiStreamDetails,
    TgiToken,
)
from server.stream import Frames, Numbered

DEFAULTS = Defaults(max_new_tokens=100, samples_if_set=True, uses_generation_config=False)


def check(wire: GenerateRequest) -> None:
    """Refuse what these answers have no place for. Raises InvalidRequest."""
    if (wire.parameters.n or 1) > 1:
        raise InvalidRequest("parameters.n must be 1: TGI answers with one text.", "parameters.n")
    if wire.stream and wire.parameters.decoder_input_details:
        raise InvalidRequest(
            "parameters.decoder_input_details cannot be told in a stream.", "parameters.decoder_input_details"
        )


def response(wire: GenerateRequest, answer: Answer, deltas: list[Delta]) -> BaseModel:
    """The body of the answer."""
    [delta] = deltas
    return TgiResponse(
        generated_text=prefix(wire) + delta.text,
        details=details(wire, answer, delta) if wire.parameters.details else None,
    )


def details(wire: GenerateRequest, answer: Answer, delta: Delta) -> TgiDetails:
    """All tokens of a text, shown or not."""
    return TgiDetails(
        finish_reason=reason(delta),
        generated_tokens=len(delta.tokens),
        seed=answer.requests[0].sampling.seed,
        prefill=[
            TgiPrefillToken(
                id=token.piece.token_id,
                text=text_of(token.piece),
                logprob=None if token.logprob is None else finite(token.logprob),
            )
            for token in delta.prompt_tokens
        ],
        tokens=[one(token.piece, token.logprob) for token in delta.tokens],
        top_tokens=[top_tokens(token) for token in delta.tokens] if wire.parameters.top_n_tokens else None,
    )


def top_tokens(token: OutputToken) -> list[TgiToken]:
    """The likeliest tokens in a token's place."""
    return [one(piece, logprob) for piece, logprob in token.top]


def one(piece: TokenPiece, logprob: float | None, text: str | None = None) -> TgiToken:
    """A single token."""
    return TgiToken(
        id=piece.token_id,
        text=text_of(piece) if text is None else text,
        logprob=None if logprob is None else finite(logprob),
        special=piece.is_special,
    )


def text_of(piece: TokenPiece) -> str:
    """The text of a token; bytes that are no character become marks, as in TGI."""
    return piece.data.decode(errors="replace")


def reason(delta: Delta) -> TgiReason:
    """Why a text ended, in TGI's words."""
    if finish_of(delta) == "length":
        return "length"
    return "eos_token" if delta.stop_reason is None else "stop_sequence"


def prefix(wire: GenerateRequest) -> str:
    """What stands before the generated text."""
    return wire.inputs if wire.parameters.return_full_text else ""


class TgiFrames(Frames):
    """An event for each piece of text; the last has all of it."""

    def __init__(self, answer: Answer, wire: GenerateRequest) -> None:
        super().__init__(answer)
        self._wire = wire
        self._texts: list[str] = []
        self._num_told = 0
        self._num_chars = 0
        self._waiting = ""
        self._delta = Numbered(lambda number, text: data_event(tgi_event(number, text)))

    def opening(self) -> bytes:
        """Nothing stands before the text."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """New text, or the end."""
        self._texts.append(delta.text)
        if self._wire.parameters.details:
            return self._token_events(delta)
        num_tokens = self.answer.streams[0].num_output_tokens
        if delta.finish_reason is not None:
            whole = prefix(self._wire) + "".join(self._texts)
            return data_event(tgi_event(num_tokens, delta.text, whole))
        return self._delta.fill(num_tokens, delta.text) if delta.text else b""

    def _token_events(self, delta: Delta) -> bytes:
        """An event for each token. Text that comes before its token waits for it."""
        self._waiting += delta.text
        if delta.finish_reason is None and not delta.tokens:
            return b""
        text, self._waiting = self._waiting, ""
        events = list(self._tokens(delta, text))
        self._num_chars += len(text)
        if delta.finish_reason is not None:
            whole = prefix(self._wire) + "".join(self._texts)
            last = events.pop() if events else tgi_event(self._num_told, text, whole)
            events.append(last.model_copy(update={"generated_text": whole, "details": self._end(delta)}))
        return b"".join(map(data_event, events))

    def _tokens(self, delta: Delta, whole: str) -> Iterator[TgiEvent]:
        """The tokens of a delta; what is shown of them is, joined, its text."""
        shown = [token for token in delta.tokens if token.is_shown]
        ends = [*(token.offset - self._num_chars for token in shown[1:]), len(whole)]
        start = 0
        for token in delta.tokens:
            text = None
            if token.is_shown:
                end = ends.pop(0)
                text, start = whole[start:end], end
            self._num_told += 1
            yield TgiEvent(
                index=self._num_told,
                token=one(token.piece, token.logprob, text),
                top_tokens=top_tokens(token) if self._wire.parameters.top_n_tokens else None,
                generated_text=None,
            )

    def _end(self, delta: Delta) -> TgiStreamDetails:
        return TgiStreamDetails(
            finish_reason=reason(delta),
            generated_tokens=self._num_told,
            seed=self.answer.requests[0].sampling.seed,
            input_length=self.answer.streams[0].num_prompt_tokens,
        )

    def ending(self) -> bytes:
        """The last event was the end."""
        return b""

    def failure(self, error: Exception) -> bytes:
        """The error envelope as an event."""
        return data_event(native_envelope(error))


def tgi_event(num_tokens: int, text: str, whole: str | None = None) -> TgiEvent:
    """An event; a token without text that ends the answer is the end-of-sequence token."""
    token = TgiToken(text=text, special=whole is not None and not text)
    return TgiEvent(index=num_tokens, token=token, generated_text=whole)


def data_event(body: BaseModel) -> bytes:
    """An event as both servers frame theirs."""
    return b"data:" + body.model_dump_json().encode() + b"\n\n"
