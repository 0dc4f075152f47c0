"""POST /v1/messages and /v1/messages/count_tokens: requests, response and events of the Anthropic API."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, RootModel, field_validator, model_validator

from server.schema.chat import (
    MAX_MESSAGES,
    MAX_PARTS,
    ChatRequest,
    ReasoningEffort,
    WireResponse,
    allow_string,
    as_parts,
)
from server.schema.errors import AnthropicError
from server.schema.fields import STRUCTURED, TOOLS, Refused, strangers
from server.schema.sampling import SamplingRequest, Stop, WireRequest


class InputBlock(WireRequest):
    """One block of a message's content. The served model reads text; other kinds are refused by name."""

    type: Literal[
        "text",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_result",
        "image",
        "document",
        "search_result",
        "container_upload",
        "server_tool_use",
        "web_search_tool_result",
    ]
    text: str | None = None
    thinking: str | None = None
    id: str | None = Field(None, description="of a tool_use")
    name: str | None = Field(None, description="of a tool_use")
    input: dict[str, Any] | None = Field(None, description="of a tool_use")
    tool_use_id: str | None = Field(None, description="of a tool_result")
    content: "Blocks | None" = Field(None, description="of a tool_result")

    @model_validator(mode="after")
    def check_kind(self) -> "InputBlock":
        """Each kind needs its own fields."""
        needed = NEEDED_FIELDS.get(self.type)
        if needed is None:
            raise ValueError(f"blocks of type {self.type!r} are not supported by this model; send text")
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f"a block of type {self.type!r} needs the field {name!r}")
        if any(inner.type != "text" for inner in self.content or ()):
            raise ValueError("the result of a tool must be text")
        return self


NEEDED_FIELDS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}

Blocks = Annotated[
    list[InputBlock], Field(max_length=MAX_PARTS, json_schema_extra=allow_string), BeforeValidator(as_parts)
]


class InputMessage(WireRequest):
    """One turn. Neighbours with the same role become one."""

    role: Literal["user", "assistant"]
    content: Blocks

    @field_validator("content")
    @classmethod
    def check_blocks(cls, blocks: list[InputBlock], info: Any) -> list[InputBlock]:
        """Calls are the assistant's, their results the user's."""
        role = info.data.get("role")
        for block in blocks:
            if role and block.type != "text" and (block.type == "tool_result") != (role == "user"):
                raise ValueError(f"a block of type {block.type!r} has no place in a message of the {role}")
        return blocks


class SystemBlock(WireRequest):
    """A part of the system prompt."""

    type: Literal["text"]
    text: str


class Thinking(WireRequest):
    """Whether the model may think before it answers."""

    type: Literal["disabled", "enabled", "adaptive"]

    @field_validator("type")
    @classmethod
    def check_type(cls, value: str) -> str:
        """What the model thinks is not told apart from its answer yet."""
        if value != "disabled":
            raise ValueError("thinking is not separated from the answer yet; it can only be disabled")
        return value


class OutputConfig(WireRequest):
    """How much effort, and which form, the answer should have."""

    effort: ReasoningEffort | None = Field(None, description="given to the chat template")
    format: None = Field(None, description=STRUCTURED.hint)


class Conversation(WireRequest):
    """What the prompt is made of."""

    messages: list[InputMessage] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        description="turns of the user and the assistant; if the last is the assistant's, it is continued",
    )
    system: (
        Annotated[
            list[SystemBlock],
            Field(max_length=MAX_PARTS, json_schema_extra=allow_string),
            BeforeValidator(as_parts),
        ]
        | None
    ) = Field(None, description="instructions that stand before the messages")
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class CountTokensRequest(Conversation):
    """Body of POST /v1/messages/count_tokens."""

    model: str | None = Field(None, max_length=512, description="name from /v1/models; may be left out")


class MessagesRequest(SamplingRequest, Conversation):
    """Body of POST /v1/messages. The sampling fields of chat that Anthropic does not know are extensions."""

    max_tokens: int = Field(
        ge=1,
        lt=2**31,
        description="output tokens at most; what the context does not hold is cut, and stop_reason tells",
    )
    stop_sequences: Stop | None = Field(None, description="strings that end the answer and are not shown")

    @field_validator("stop_sequences")
    @classmethod
    def check_stop_sequences(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """NUL is no text."""
        if any("\0" in text for text in value or ()):
            raise ValueError("must not contain NUL characters")
        return value


PROMPT_ONLY: dict[str, Refused] = {
    "tools": Refused(([],), TOOLS),
    "tool_choice": Refused(({"type": "auto"}, {"type": "none"}), TOOLS),
    "mcp_servers": Refused(([],), TOOLS),
    "container": Refused((), TOOLS),
    "context_management": Refused(({}, {"edits": []}), "edit the messages before sending them"),
}
MESSAGES: dict[str, Refused] = (
    strangers(MessagesRequest, ChatRequest)
    | PROMPT_ONLY
    | {
        "n": Refused((1,), "an answer is one message"),
        "stop": Refused(([],), "use stop_sequences"),
        "stream_options": Refused(({},), "the last events always have the token counts"),
        "max_completion_tokens": Refused((), "use max_tokens"),
        "prompt": Refused((), "send messages"),
    }
)


class TextBlock(WireResponse):
    """Text of the answer."""

    type: Literal["text"] = "text"
    text: str


class MessageUsage(WireResponse):
    """Token counts. The prompt is the sum of the three kinds of input."""

    input_tokens: int = Field(description="prompt tokens that were computed")
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = Field(0, description="prompt tokens taken from the prefix cache")
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "model_context_window_exceeded"]


class Message(WireResponse):
    """Answer of POST /v1/messages, and what message_start begins with."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock]
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
    content_block: TextBlock


class TextPiece(WireResponse):
    """More text."""

    type: Literal["text_delta"] = "text_delta"
    text: str


class BlockDelta(WireResponse):
    """What is new of a block."""

    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: TextPiece


class BlockStop(WireResponse):
    """A block is whole."""

    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class Ending(WireResponse):
    """Why the answer ended."""

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
