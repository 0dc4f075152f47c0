"""LightLLM's answers: texts as a list, counts beside them."""

from typing import TypeVar

from pydantic import BaseModel

from engine.errors import InvalidRequest
from engine.outputs import OutputToken, TextDelta
from server.answer import Answer, Delta, finish_of
from server.errors import native_envelope
from server.logprobs import finite
from server.routes.native.convert import Defaults
from server.routes.native.tgi import data_event, prefix
from server.routes.native.tokens import TokenTexts
from server.schema.native import GenerateRequest, LightllmEvent, LightllmResponse, LightllmToken
from server.schema.refused_fields import UnsupportedField
from server.stream import Frames, JsonTemplate

T = TypeVar("T")

DEFAULTS = Defaults(max_new_tokens=16, samples_if_set=False, uses_generation_config=True, best_of_is_n=True)


def check(wire: GenerateRequest) -> None:
    """Refuse what these answers have no place for. Raises InvalidRequest."""
    parameters = wire.parameters
    if parameters.details:
        raise UnsupportedField("details is not supported: LightLLM has return_details.", "details")
    if parameters.n and parameters.best_of and parameters.n != parameters.best_of:
        raise InvalidRequest("parameters.best_of must be left out or equal n.", "parameters.best_of")
    if wire.stream and (parameters.n or parameters.best_of or 1) > 1:
        raise InvalidRequest("parameters.n must be 1 in a stream.", "parameters.n")


def response(wire: GenerateRequest, answer: Answer, deltas: list[Delta]) -> BaseModel:
    """The body of the answer."""
    details: list[LightllmToken] | list[list[LightllmToken]] | None = None
    if wire.parameters.return_details:
        details = alone([tokens(answer, delta) for delta in deltas])
    return LightllmResponse(
        generated_text=[prefix(wire) + delta.text for delta in deltas],
        count_output_tokens=alone([stream.num_output_tokens for stream in answer.streams]),
        finish_reason=alone([finish_of(delta) for delta in deltas]),
        prompt_tokens=answer.streams[0].num_prompt_tokens,
        tokens=details,
    )


def tokens(answer: Answer, delta: Delta) -> list[LightllmToken]:
    """All tokens of a text, shown or not."""
    pairs = TokenTexts().take(delta)
    return [one(answer, number, token, text or "") for number, (token, text) in enumerate(pairs, 1)]


def one(answer: Answer, number: int, token: OutputToken, text: str) -> LightllmToken:
    """A single token, the `number`th of its text."""
    return LightllmToken(
        count_output_tokens=number,
        id=token.piece.token_id,
        text=text,
        logprob=None if token.logprob is None else finite(token.logprob),
        special=token.piece.is_special,
        prompt_tokens=answer.streams[0].num_prompt_tokens,
    )


def alone(values: list[T]) -> T | list[T]:
    """A list of one is written without its brackets."""
    return values[0] if len(values) == 1 else values


class LightllmFrames(Frames):
    """Makes an event for each piece of text."""

    def __init__(self, answer: Answer, wire: GenerateRequest) -> None:
        super().__init__(answer)
        self._prefix = prefix(wire)
        self._texts = TokenTexts() if wire.parameters.return_details else None
        self._num_tokens = 0
        self._delta = JsonTemplate(lambda number, text: data_event(self._event(number, TextDelta(text, 1))))

    def opening(self) -> bytes:
        """Return nothing: the text comes first."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """New text, or the end."""
        if self._texts is not None:
            return self._token_events(delta, self._texts)
        text, self._prefix = self._prefix + delta.text, ""
        num_tokens = self.answer.streams[0].num_output_tokens
        if delta.finish_reason is not None:
            return data_event(self._event(num_tokens, delta._replace(text=text)))
        return self._delta.fill_numbered(num_tokens, text) if text else b""

    def _token_events(self, delta: Delta, texts: TokenTexts) -> bytes:
        """An event for each token."""
        events: list[LightllmEvent] = []
        for token, text in texts.take(delta):
            self._num_tokens += 1
            shown, self._prefix = self._prefix + (text or ""), ""
            single = one(self.answer, self._num_tokens, token, shown)
            events.append(LightllmEvent(token=single, finished=False, finish_reason=None))
        if delta.finish_reason is not None:
            rest = delta._replace(text=self._prefix + texts.waiting)
            last = events.pop() if events else self._event(self._num_tokens, rest)
            ending = {"finished": True, "finish_reason": finish_of(delta)}
            events.append(last.model_copy(update=ending))
        return b"".join(map(data_event, events))

    def ending(self) -> bytes:
        """The last event was the end."""
        return b""

    def failure(self, error: Exception) -> bytes:
        """The error envelope as an event."""
        return data_event(native_envelope(error))

    def _event(self, num_tokens: int, delta: Delta) -> LightllmEvent:
        is_last = delta.finish_reason is not None
        token = LightllmToken(
            count_output_tokens=num_tokens,
            text=delta.text,
            special=is_last and not delta.text,
            prompt_tokens=self.answer.streams[0].num_prompt_tokens,
        )
        return LightllmEvent(
            token=token, finished=is_last, finish_reason=finish_of(delta) if is_last else None
        )
