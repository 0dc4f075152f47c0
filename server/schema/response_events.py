"""The events of a streamed response of POST /v1/responses."""

from typing import Annotated, Literal

from pydantic import Field, RootModel

from server.schema.responses import OutputItem, OutputText, ReasoningText, ResponseObject, TextLogprobs
from server.schema.wire import WireResponse

StateKind = Literal[
    "response.created",
    "response.in_progress",
    "response.completed",
    "response.incomplete",
    "response.failed",
]
ItemKind = Literal["response.output_item.added", "response.output_item.done"]
PartKind = Literal["response.content_part.added", "response.content_part.done"]


class StateEvent(WireResponse):
    """The response has reached a state."""

    type: StateKind
    sequence_number: int
    response: ResponseObject


class ItemEvent(WireResponse):
    """An item of the output begins, or is whole."""

    type: ItemKind
    sequence_number: int
    output_index: int
    item: OutputItem = Field(discriminator="type")


class PartEvent(WireResponse):
    """A part of an item begins, or is whole."""

    type: PartKind
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText = Field(discriminator="type")


class TextDeltaEvent(WireResponse):
    """More text."""

    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: TextLogprobs = Field(default_factory=list)


class TextDoneEvent(WireResponse):
    """All of the text."""

    type: Literal["response.output_text.done"] = "response.output_text.done"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: TextLogprobs = Field(default_factory=list)


class ReasoningDeltaEvent(WireResponse):
    """More of what the model thinks."""

    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningDoneEvent(WireResponse):
    """All of what the model thought."""

    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str


class ArgumentsDeltaEvent(WireResponse):
    """More of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(WireResponse):
    """All of a call's arguments."""

    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


class ResponseEvent(
    RootModel[
        Annotated[
            StateEvent
            | ItemEvent
            | PartEvent
            | TextDeltaEvent
            | TextDoneEvent
            | ReasoningDeltaEvent
            | ReasoningDoneEvent
            | ArgumentsDeltaEvent
            | ArgumentsDoneEvent,
            Field(discriminator="type"),
        ]
    ]
):
    """One event of a streamed response; `event:` repeats its type, and the numbers count up from 0."""
