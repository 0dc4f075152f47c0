"""POST /v1/messages and /v1/messages/count_tokens: requests of the Anthropic API."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from server.schema.chat import MAX_MESSAGES, MAX_PARTS, ReasoningEffort, allow_string, as_parts
from server.schema.foreign import SEPARATE, TURNS, prompt_field
from server.schema.refused_fields import Refused
from server.schema.sampling import Sampling, Stop
from server.schema.tools import MAX_TOOLS, NAME, ObjectSchema, leave_out_tools
from server.schema.wire import ModelRequest, Needed, TypedRequest, Wire, WireRequest

# Blocks of tools that other servers run, and what only they can read. They hold nothing for a prompt.
LEFT_OUT = frozenset(
    (
        *("redacted_thinking", "server_tool_use", "mcp_tool_use", "mcp_tool_result", "tool_reference"),
        *("web_search_tool_result", "web_fetch_tool_result", "tool_search_tool_result"),
        *("code_execution_tool_result", "bash_code_execution_tool_result"),
        "text_editor_code_execution_tool_result",
    )
)


def as_blocks(value: Any) -> Any:
    """Return content as a list of blocks, with documents and search results of text as blocks of text.

    Of blocks that hold nothing for a prompt only the type is kept, so that errors name the right block.
    """
    return [_as_block(block) if isinstance(block, dict) else block for block in as_parts(value)]


def _as_block(block: dict[str, Any]) -> dict[str, Any]:
    kind, source = block.get("type"), block.get("source")
    if isinstance(kind, str) and kind in LEFT_OUT:
        return {"type": kind}
    if kind == "search_result":
        said, names = _text_of(block.get("content")), (block.get("title"), source)
    elif kind == "document" and isinstance(source, dict) and source.get("type") in ("text", "content"):
        field = "data" if source["type"] == "text" else "content"
        said, names = _text_of(source.get(field)), (block.get("title"), block.get("context"))
    else:
        return block
    if said is None:
        return block
    return {"type": "text", "text": "\n".join([*(name for name in names if isinstance(name, str)), said])}


def _text_of(content: Any) -> str | None:
    """Return a string, or the joined texts of a list of blocks; None if it holds anything else."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [
        str(part["text"]) for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)
    ]
    return "\n".join(texts) if texts and len(texts) == len(parts) else None


class InputBlock(TypedRequest):
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
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "tool_reference",
        "mcp_tool_use",
        "mcp_tool_result",
    ]
    text: str | None = None
    thinking: str | None = None
    id: str | None = Field(None, description="of a tool_use")
    name: str | None = Field(None, description="of a tool_use")
    input: dict[str, Any] | None = Field(None, description="of a tool_use")
    tool_use_id: str | None = Field(None, description="of a tool_result")
    content: "Blocks | None" = Field(None, description="of a tool_result")

    NEEDED: ClassVar[Needed] = {
        "text": ("text",),
        "thinking": ("thinking",),
        **dict.fromkeys(LEFT_OUT, ()),
        "tool_use": ("id", "name", "input"),
        "tool_result": ("tool_use_id",),
    }

    @field_validator("type")
    @classmethod
    def check_type(cls, value: str) -> str:
        """Refuse kinds of blocks that hold no text."""
        if value not in cls.NEEDED:
            raise ValueError(f"blocks of type {value!r} are not supported by this model; send text")
        return value

    @field_validator("content")
    @classmethod
    def check_content(cls, value: "list[InputBlock] | None") -> "list[InputBlock] | None":
        """Refuse results that are not text."""
        if any(inner.type not in ("text", "tool_reference") for inner in value or ()):
            raise ValueError("the result of a tool must be text")
        return value


Blocks = Annotated[
    list[InputBlock],
    Field(max_length=MAX_PARTS, fail_fast=True, json_schema_extra=allow_string),
    BeforeValidator(as_blocks),
]


class InputMessage(WireRequest):
    """One turn. Neighbouring turns of one role are merged. Instructions may come later than `system`, too."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @field_validator("content")
    @classmethod
    def check_blocks(cls, blocks: list[InputBlock], info: Any) -> list[InputBlock]:
        """Check that calls are the assistant's and their results the user's."""
        role = info.data.get("role")
        for block in blocks:
            owner = "user" if block.type == "tool_result" else "assistant"
            if role and block.type != "text" and role != owner:
                raise ValueError(f"a block of type {block.type!r} has no place in a message of the {role}")
        return blocks


class SystemBlock(WireRequest):
    """A part of the system prompt."""

    type: Literal["text"]
    text: str


class Thinking(WireRequest):
    """Turns reasoning on or off. It comes in blocks of its own, unsigned."""

    type: Literal["disabled", "enabled", "adaptive"] = Field(
        description="disabled sets enable_thinking of the chat template to false, the others to true"
    )
    budget_tokens: int | None = Field(None, ge=1, lt=2**31, description="accepted; max_tokens is the limit")


class InputTool(WireRequest):
    """A tool the model may call."""

    type: Literal["custom"] | None = Field(None, description="custom, which is the default")
    name: str = Field(pattern=NAME)
    description: str | None = None
    input_schema: ObjectSchema | None = Field(None, validate_default=True, description="JSON schema")
    strict: bool | None = Field(
        None, description="a schema that cannot be obeyed to the letter is refused where a call is demanded"
    )

    @field_validator("input_schema")
    @classmethod
    def check_schema(cls, value: dict[str, Any] | None) -> dict[str, Any]:
        """Refuse a tool without a schema."""
        if value is None:
            raise ValueError("a tool needs it")
        return value

    @property
    def for_chat(self) -> dict[str, Any]:
        """Return the tool as chat has it."""
        function = {"name": self.name, "parameters": self.input_schema, "strict": self.strict}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class InputChoice(TypedRequest):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="of the one that must be called")
    disable_parallel_tool_use: bool | None = Field(None, description="the answer ends after its first call")

    NEEDED: ClassVar[Needed] = {"tool": ("name",)}

    @property
    def for_chat(self) -> str | dict[str, Any]:
        """Return the choice as chat has it."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class OutputFormat(WireRequest):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(WireRequest):
    """Effort and form of the answer."""

    effort: ReasoningEffort | None = Field(None, description="given to the chat template")
    format: OutputFormat | None = None


ONLY_CLIENTS = "only tools that the client runs can be called"


class Conversation(ModelRequest):
    """The fields that make the prompt."""

    DIALECT = "messages"
    REFUSED: ClassVar[Mapping[str, Refused]] = {
        "mcp_servers": prompt_field(([],), ONLY_CLIENTS),
        "container": prompt_field(hint=ONLY_CLIENTS),
        "n": Refused((1,), "an answer is one message"),
        "stop": Refused(([],), "use stop_sequences"),
        "stream_options": Refused(({},), "the last events always have the token counts"),
        "max_completion_tokens": Refused((), "use max_tokens"),
        "prompt": Refused((), "send messages"),
        "response_format": Refused(({"type": "text"},), "use output_config.format"),
        "reasoning_effort": Refused((), "use output_config.effort"),
        "parallel_tool_calls": Refused((True,), "use tool_choice.disable_parallel_tool_use"),
        "add_generation_prompt": TURNS,
        "separate_reasoning": SEPARATE,
    }

    messages: list[InputMessage] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        fail_fast=True,
        description="turns of the user and the assistant; if the last is the assistant's, it is continued",
    )
    system: (
        Annotated[
            list[SystemBlock],
            Field(max_length=MAX_PARTS, fail_fast=True, json_schema_extra=allow_string),
            BeforeValidator(as_parts),
        ]
        | None
    ) = Field(None, description="instructions in front of the messages")
    tools: Annotated[list[InputTool] | None, leave_out_tools(("custom", None), "input_schema")] = Field(
        None,
        max_length=MAX_TOOLS,
        description="what the model may call; an empty list is none; tools that the API itself defines are "
        "left out",
    )
    tool_choice: InputChoice | None = Field(None, description="default auto if there are tools")
    thinking: Thinking | None = None
    output_config: Annotated[OutputConfig | None, Wire(neutral=({},), shapes_prompt=True)] = None
    output_format: OutputFormat | None = Field(None, description="the earlier name of output_config.format")

    @field_validator("output_format")
    @classmethod
    def check_one_format(cls, value: OutputFormat | None, info: ValidationInfo) -> OutputFormat | None:
        """Refuse two forms of the answer."""
        config = info.data.get("output_config")
        if value is not None and config is not None and config.format is not None:
            raise ValueError("send output_config.format alone; this is its earlier name")
        return value


class CountTokensRequest(Conversation):
    """Body of POST /v1/messages/count_tokens."""

    REFUSES = "prompt"


class MessagesRequest(Sampling, Conversation):
    """Body of POST /v1/messages. The sampling fields of chat that Anthropic does not know are extensions."""

    max_tokens: int = Field(
        ge=0,
        lt=2**31,
        description="output tokens at most; cut to what fits into the context, and stop_reason says so; "
        "0 only computes the prompt, which is then in the prefix cache",
    )
    stop_sequences: Stop | None = Field(None, description="strings that end the answer and are not shown")
