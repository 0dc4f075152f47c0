"""TGI's answers: text as a string; the last event of a stream has all of it."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from engine.errors import InvalidRequest
from engine.outputs import OutputToken, TokenPiece
from server.answer import Answer, Delta, finish_of
from server.errors import native_envelope
from server.logprobs import finite, mean_logprob
from server.routes.native.convert import Defaults
from server.routes.native.tokens import TokenTexts
from server.schema.native import (
    GenerateRequest,
    TgiBestOfSequence,
    TgiDetails,
    TgiEvent,
    TgiPrefillToken,
    TgiReason,
    TgiResponse,
    TgiStreamDetails,
    TgiToken,
)
from server.schema.refused_fields import UnsupportedField
from server.stream import Frames, JsonTemplate

DEFAULTS = Defaults(max_new_tokens=100, samples_if_set=True, uses_generation_config=False, best_of_is_n=False)


def check(wire: GenerateRequest) -> None:
    """Refuse what these answers have no place for. Raises InvalidRequest."""
    if wire.parameters.return_details:
        raise UnsupportedField("return_details is not supported: TGI has details.", "return_details")
    if (wire.parameters.n or 1) > 1:
        raise InvalidRequest("parameters.n must be 1: TGI answers with one text.", "parameters.n")
    if wire.stream and (wire.parameters.best_of or 1) > 1:
        raise InvalidRequest(
            "parameters.best_of must be 1 in a stream: the best is known only at the end.",
            "parameters.best_of",
        )
    if wire.stream and wire.parameters.decoder_input_details:
        raise InvalidRequest(
            "parameters.decoder_input_details cannot be told in a stream.", "parameters.decoder_input_details"
        )


def response(wire: GenerateRequest, answer: Answer, deltas: list[Delta]) -> BaseModel:
    """The body of the answer: the best text."""
    texts = [prefix(wire) + delta.text for delta in deltas]
    best = max(range(len(deltas)), key=lambda index: mean_logprob(deltas[index].tokens))
    if not wire.parameters.details:
        return TgiResponse(generated_text=texts[best], details=None)
    sequences = [sequence(wire, answer, deltas, index) for index in range(len(deltas))]
    others = [
        TgiBestOfSequence(generated_text=texts[index], **sequences[index])
        for index in range(len(deltas))
        if index != best
    ]
    return TgiResponse(
        generated_text=texts[best], details=TgiDetails(best_of_sequences=others or None, **sequences[best])
    )


def sequence(wire: GenerateRequest, answer: Answer, deltas: list[Delta], index: int) -> dict[str, Any]:
    """The fields of a TgiSequence: all tokens of a text, shown or not."""
    delta = deltas[index]
    return {
        "finish_reason": reason(delta),
        "generated_tokens": len(delta.tokens),
        "seed": answer.requests[index].sampling.seed,
        "prefill": [
            TgiPrefillToken(
                id=token.piece.token_id,
                text=text_of(token.piece),
                logprob=None if token.logprob is None else finite(token.logprob),
            )
            for token in deltas[0].prompt_tokens  # only the first has them
        ],
        "tokens": [one(token.piece, token.logprob) for token in delta.tokens],
        "top_tokens": (
            [top_tokens(token) for token in delta.tokens] if wire.parameters.top_n_tokens else None
        ),
    }


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
    """Return why a text ended, in TGI's words."""
    if finish_of(delta) == "length":
        return "length"
    return "eos_token" if delta.stop_reason is None else "stop_sequence"


def prefix(wire: GenerateRequest) -> str:
    """Return the text in front of the generated one."""
    return wire.inputs if wire.parameters.return_full_text else ""


class TgiFrames(Frames):
    """Makes an event for each piece of text; the last has all of it."""

    def __init__(self, answer: Answer, wire: GenerateRequest) -> None:
        super().__init__(answer)
        self._wire = wire
        self._texts: list[str] = []
        self._num_tokens = 0
        self._token_texts = TokenTexts()
        self._delta = JsonTemplate(lambda number, text: data_event(tgi_event(number, text)))

    def opening(self) -> bytes:
        """Return nothing: the text comes first."""
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
        return self._delta.fill_numbered(num_tokens, delta.text) if delta.text else b""

    def _token_events(self, delta: Delta) -> bytes:
        """An event for each token."""
        events = list(self._tokens(delta))
        if delta.finish_reason is not None:
            whole = prefix(self._wire) + "".join(self._texts)
            last = events.pop() if events else tgi_event(self._num_tokens, self._token_texts.waiting, whole)
            events.append(last.model_copy(update={"generated_text": whole, "details": self._end(delta)}))
        return b"".join(map(data_event, events))

    def _tokens(self, delta: Delta) -> Iterator[TgiEvent]:
        for token, text in self._token_texts.take(delta):
            self._num_tokens += 1
            yield TgiEvent(
                index=self._num_tokens,
                token=one(token.piece, token.logprob, text),
                top_tokens=top_tokens(token) if self._wire.parameters.top_n_tokens else None,
                generated_text=None,
            )

    def _end(self, delta: Delta) -> TgiStreamDetails:
        return TgiStreamDetails(
            finish_reason=reason(delta),
            generated_tokens=self._num_tokens,
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
