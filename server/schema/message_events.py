"""POST /v1/messages and /v1/messages/count_tokens: answers of the Anthropic API, whole and as events."""

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from server.schema.errors import AnthropicError
from server.schema.wire import WireResponse


class TextBlock(WireResponse):
    """Text of the answer."""

    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(WireResponse):
    """Reasoning of the model. It is not signed, and need not be signed to be sent back."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: Literal[""] = ""


class ToolUseBlock(WireResponse):
    """A call of a tool."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any] = Field(description="empty if the answer was cut inside it")


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(WireResponse):
    """Token counts. The prompt is the sum of the three kinds of input."""

    input_tokens: int = Field(description="prompt tokens that were computed")
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = Field(0, description="prompt tokens taken from the prefix cache")
    output_tokens: int


StopReason = Literal["end_turn", "tool_use", "max_tokens", "stop_sequence", "model_context_window_exceeded"]


class Message(WireResponse):
    """Answer of POST /v1/messages, and what message_start begins with."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Annotated[ContentBlock, Field(discriminator="type")]]
    stop_reason: StopReason | None
    stop_sequence: str | None = Field(description="the one of stop_sequences that ended the answer")
    usage: MessageUsage


class CountTokensResponse(WireResponse):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class MessageStart(WireResponse):
    """The first event."""

    type: Literal["message_start"] = "message_start"
    message: Message


class BlockStart(WireResponse):
    """A block begins."""

    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: ContentBlock = Field(discriminator="type")


class TextPiece(WireResponse):
    """More text."""

    type: Literal["text_delta"] = "text_delta"
    text: str


class ThinkingPiece(WireResponse):
    """More of the reasoning."""

    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


class InputPiece(WireResponse):
    """More of a call's input: joined, it is a JSON object."""

    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


Piece = TextPiece | ThinkingPiece | InputPiece


class BlockDelta(WireResponse):
    """New text of a block."""

    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: Piece = Field(discriminator="type")


class BlockStop(WireResponse):
    """A block is whole."""

    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class Ending(WireResponse):
    """The reason why the answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(WireResponse):
    """The answer has ended; the counts are those of all of it."""

    type: Literal["message_delta"] = "message_delta"
    delta: Ending
    usage: MessageUsage


class MessageStop(WireResponse):
    """The last event."""

    type: Literal["message_stop"] = "message_stop"


class Ping(WireResponse):
    """Nothing new; the stream is alive."""

    type: Literal["ping"] = "ping"


class MessageEvent(
    RootModel[
        Annotated[
            MessageStart
            | BlockStart
            | Ping
            | BlockDelta
            | BlockStop
            | MessageDelta
            | MessageStop
            | AnthropicError,
            Field(discriminator="type"),
        ]
    ]
):
    """One event of a streamed answer; `event:` repeats its type."""
