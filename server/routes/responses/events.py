"""Text deltas -> the numbered events of the Responses API."""

from itertools import count
from typing import Literal, TypedDict

from engine.outputs import FinishReason
from server.answer import Answer, Delta
from server.convert import Limits
from server.errors import message_of
from server.schema.responses import (
    IncompleteDetails,
    InputDetails,
    ItemEvent,
    ItemKind,
    JsonObject,
    JsonSchema,
    OutputDetails,
    OutputMessage,
    OutputText,
    PartEvent,
    PartKind,
    PlainText,
    ReasoningSettings,
    ResponseError,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    StateEvent,
    StateKind,
    TextDeltaEvent,
    TextDoneEvent,
    TextSettings,
)
from server.stream import Frames, Numbered, named_event


class Place(TypedDict):
    """Where the text of the one part of the one message stands."""

    item_id: str
    output_index: int
    content_index: int


class ResponseFrames(Frames):
    """The states of a response around one message, which has one part."""

    def __init__(self, answer: Answer, response: ResponseObject) -> None:
        super().__init__(answer)
        self._response = response
        self._numbers = count()
        self._texts: list[str] = []
        self._last: Delta | None = None
        self._place: Place = {"item_id": message_id(answer), "output_index": 0, "content_index": 0}
        self._delta = Numbered(
            lambda number, text: named_event(
                TextDeltaEvent(sequence_number=number, delta=text, **self._place)
            )
        )

    def opening(self) -> bytes:
        """The response without output. What of the prompt was cached is known later."""
        return self._state("response.created", self._response) + self._state(
            "response.in_progress", self._response
        )

    def delta(self, index: int, delta: Delta) -> bytes:
        """New text; the first opens the message and its part."""
        if delta.finish_reason is not None:
            self._last = delta
        if not delta.text:
            return b""
        opening = b"" if self._texts else self._opened()
        self._texts.append(delta.text)
        return opening + self._delta.fill(next(self._numbers), delta.text)

    def ending(self) -> bytes:
        """The whole part, the whole message, the whole response."""
        assert self._last is not None
        opening = b"" if self._texts else self._opened()
        text = "".join(self._texts)
        response = ended(self._response, self.answer, self._last._replace(text=text))
        done = TextDoneEvent(sequence_number=next(self._numbers), text=text, **self._place)
        kind: StateKind = "response.completed" if response.status == "completed" else "response.incomplete"
        return (
            opening
            + named_event(done)
            + self._part("response.content_part.done", text)
            + self._item("response.output_item.done", response.output[0])
            + self._state(kind, response)
        )

    def failure(self, error: Exception) -> bytes:
        """The response in the state failed, with the reason."""
        reason = ResponseError(message=message_of(error))
        return self._state(
            "response.failed", self._response.model_copy(update={"status": "failed", "error": reason})
        )

    def _opened(self) -> bytes:
        message = OutputMessage(id=message_id(self.answer), status="in_progress", content=[])
        return self._item("response.output_item.added", message) + self._part(
            "response.content_part.added", ""
        )

    def _item(self, kind: ItemKind, message: OutputMessage) -> bytes:
        number = next(self._numbers)
        return named_event(ItemEvent(type=kind, sequence_number=number, output_index=0, item=message))

    def _part(self, kind: PartKind, text: str) -> bytes:
        part = OutputText(text=text)
        return named_event(
            PartEvent(type=kind, sequence_number=next(self._numbers), part=part, **self._place)
        )

    def _state(self, kind: StateKind, response: ResponseObject) -> bytes:
        return named_event(StateEvent(type=kind, sequence_number=next(self._numbers), response=response))


def message_id(answer: Answer) -> str:
    """The id of the one message of a response."""
    return answer.id.replace("resp_", "msg_")


def begun(answer: Answer, wire: ResponsesRequest, limits: Limits) -> ResponseObject:
    """The response before there is any output."""
    defaults = limits.generation_defaults
    return ResponseObject(
        id=answer.id,
        created_at=answer.created,
        status="in_progress",
        instructions=wire.instructions,
        max_output_tokens=wire.max_output_tokens,
        metadata=wire.metadata or {},
        model=answer.model,
        output=[],
        parallel_tool_calls=wire.parallel_tool_calls is not False,
        reasoning=ReasoningSettings(effort=wire.reasoning.effort if wire.reasoning else None),
        temperature=defaults.get("temperature", 1.0) if wire.temperature is None else wire.temperature,
        top_p=defaults.get("top_p", 1.0) if wire.top_p is None else wire.top_p,
        text=TextSettings(format=text_format(wire)),
        usage=None,
    )


def text_format(wire: ResponsesRequest) -> PlainText | JsonObject | JsonSchema:
    """The form of the text, as it was asked for."""
    wanted = wire.text and wire.text.format
    if not wanted or wanted.type == "text":
        return PlainText()
    if wanted.type == "json_object":
        return JsonObject()
    return JsonSchema(
        name=wanted.name,
        description=wanted.description,
        schema_=wanted.schema_ or {},
        strict=wanted.strict is not False,
    )


def ended(response: ResponseObject, answer: Answer, delta: Delta) -> ResponseObject:
    """The response with its whole output."""
    status: Literal["incomplete", "completed"] = (
        "incomplete" if delta.finish_reason is FinishReason.LENGTH else "completed"
    )
    counts = answer.usage()
    usage = ResponseUsage(
        input_tokens=counts.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=counts.prompt_tokens_details.cached_tokens),
        output_tokens=counts.completion_tokens,
        output_tokens_details=OutputDetails(
            reasoning_tokens=counts.completion_tokens_details.reasoning_tokens
        ),
        total_tokens=counts.total_tokens,
    )
    message = OutputMessage(id=message_id(answer), status=status, content=[OutputText(text=delta.text)])
    return response.model_copy(
        update={
            "status": status,
            "incomplete_details": IncompleteDetails() if status == "incomplete" else None,
            "output": [message],
            "usage": usage,
        }
    )
