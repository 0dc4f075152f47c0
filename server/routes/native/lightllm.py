"""LightLLM's answers: texts as a list, counts beside them."""

from typing import TypeVar

from pydantic import BaseModel

from engine.errors import InvalidRequest
from engine.outputs import TextDelta
from server.answer import Answer, Delta, finish_of
from server.errors import UnsupportedField, native_envelope
from server.routes.native.convert import Defaults
from server.routes.native.tgi import data_event, prefix
from server.schema.native import GenerateRequest, LightllmEvent, LightllmResponse, LightllmToken
from server.stream import Frames, Numbered

T = TypeVar("T")

DEFAULTS = Defaults(max_new_tokens=16, samples_if_set=False, uses_generation_config=True)


def check(wire: GenerateRequest) -> None:
    """Refuse what these answers have no place for. Raises InvalidRequest."""
    if wire.parameters.details:
        raise UnsupportedField("details is not supported: LightLLM's answers have none.", "details")
    if wire.stream and (wire.parameters.n or 1) > 1:
        raise InvalidRequest("parameters.n must be 1 in a stream.", "parameters.n")


def response(wire: GenerateRequest, answer: Answer, deltas: list[Delta]) -> BaseModel:
    """The body of the answer."""
    return LightllmResponse(
        generated_text=[prefix(wire) + delta.text for delta in deltas],
        count_output_tokens=alone([stream.num_output_tokens for stream in answer.streams]),
        finish_reason=alone([finish_of(delta) for delta in deltas]),
        prompt_tokens=answer.streams[0].num_prompt_tokens,
    )


def alone(values: list[T]) -> T | list[T]:
    """A list of one is written without its brackets."""
    return values[0] if len(values) == 1 else values


class LightllmFrames(Frames):
    """An event for each piece of text."""

    def __init__(self, answer: Answer, wire: GenerateRequest) -> None:
        super().__init__(answer)
        self._prefix = prefix(wire)
        self._delta = Numbered(lambda number, text: data_event(self._event(number, TextDelta(text, 1))))

    def opening(self) -> bytes:
        """Nothing stands before the text."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """New text, or the end."""
        text, self._prefix = self._prefix + delta.text, ""
        num_tokens = self.answer.streams[0].num_output_tokens
        if delta.finish_reason is not None:
            return data_event(self._event(num_tokens, delta._replace(text=text)))
        return self._delta.fill(num_tokens, text) if text else b""

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
