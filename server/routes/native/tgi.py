"""TGI's answers: text as a string; the last event of a stream has all of it."""

from pydantic import BaseModel

from engine.errors import InvalidRequest
from server.answer import Answer, Delta
from server.errors import native_envelope
from server.routes.native.convert import Defaults
from server.schema.native import GenerateRequest, TgiEvent, TgiResponse, TgiToken
from server.stream import Frames, Numbered

DEFAULTS = Defaults(max_new_tokens=100, samples_if_set=True, uses_generation_config=False)


def check(wire: GenerateRequest) -> None:
    """Refuse what these answers have no place for. Raises InvalidRequest."""
    if (wire.parameters.n or 1) > 1:
        raise InvalidRequest("parameters.n must be 1: TGI answers with one text.", "parameters.n")


def response(wire: GenerateRequest, answer: Answer, deltas: list[Delta]) -> BaseModel:
    """The body of the answer."""
    [delta] = deltas
    return TgiResponse(generated_text=prefix(wire) + delta.text)


def prefix(wire: GenerateRequest) -> str:
    """What stands before the generated text."""
    return wire.inputs if wire.parameters.return_full_text else ""


class TgiFrames(Frames):
    """An event for each piece of text; the last has all of it."""

    def __init__(self, answer: Answer, wire: GenerateRequest) -> None:
        super().__init__(answer)
        self._wire = wire
        self._texts: list[str] = []
        self._delta = Numbered(lambda number, text: data_event(tgi_event(number, text)))

    def opening(self) -> bytes:
        """Nothing stands before the text."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """New text, or the end."""
        self._texts.append(delta.text)
        num_tokens = self.answer.streams[0].num_output_tokens
        if delta.finish_reason is not None:
            whole = prefix(self._wire) + "".join(self._texts)
            return data_event(tgi_event(num_tokens, delta.text, whole))
        return self._delta.fill(num_tokens, delta.text) if delta.text else b""

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
