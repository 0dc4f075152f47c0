"""POST /v1/chat/completions: request, response and stream chunk."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
)

from engine.readouts import MAX_LOGPROBS
from server.schema.beam import Beams
from server.schema.extensions import Extensions
from server.schema.logprobs import ChatLogprobs, PromptLogprobs, is_none
from server.schema.refused_fields import Refused
from server.schema.sampling import PROMPT_LOGPROBS, Finish, Sampling, Usage, check_prompt_logprobs
from server.schema.structured import Structured
from server.schema.tools import (
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    AnswerToolCall,
    Choice,
    Tool,
    ToolCall,
    ToolCallDelta,
    leave_out_tools,
)
from server.schema.wire import Needed, TypedRequest, Wire, WireRequest, WireResponse

MAX_MESSAGES = 4096
MAX_PARTS = 4096
ChatFinish = Finish | Literal["tool_calls"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ContentPart(TypedRequest):
    """One part of a message's content. The served model reads text; other kinds are refused by name."""

    type: Literal["text", "refusal", "image_url", "input_audio", "file", "video_url", "audio_url"]
    text: str | None = None
    refusal: str | None = None

    NEEDED: ClassVar[Needed] = {"text": ("text",), "refusal": ("refusal",)}

    @field_validator("type")
    @classmethod
    def check_type(cls, value: str) -> str:
        """Refuse parts that hold no text."""
        if value not in cls.NEEDED:
            raise ValueError(f"content parts of type {value!r} are not supported by this model; send text")
        return value

    @property
    def plain_text(self) -> str | None:
        """The text this part adds to the prompt."""
        return self.text if self.type == "text" else self.refusal


def as_parts(value: Any) -> Any:
    """The two spellings of content as one: a string is a single part of text, alone or in a list."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts")
    return [
        {"type": "text", "text": part} if isinstance(part, str) else part for part in value[: MAX_PARTS + 1]
    ]


def allow_string(schema: dict[str, Any]) -> None:
    """Add the spellings that as_parts() takes to the JSON schema."""
    parts = dict(schema)
    schema.clear()
    schema["anyOf"] = [{"type": "string"}, parts]


Content = Annotated[
    list[ContentPart],
    Field(max_length=MAX_PARTS, fail_fast=True, json_schema_extra=allow_string),
    BeforeValidator(as_parts),
]


class ChatMessage(WireRequest):
    """One turn of the conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Content | None = Field(None, validate_default=True)
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOL_CALLS, fail_fast=True)
    tool_call_id: str | None = Field(None, validate_default=True)
    refusal: str | None = None
    reasoning_content: str | None = Field(None, description="earlier reasoning, for templates that want it")
    reasoning: str | None = Field(None, description="another name for reasoning_content")

    @field_validator("content")
    @classmethod
    def check_content(cls, value: list[ContentPart] | None, info: ValidationInfo) -> list[ContentPart] | None:
        """Refuse a message of the user or the system without content."""
        role = info.data.get("role")
        if value is None and role in ("developer", "system", "user"):
            raise ValueError(f"in a message with role {role!r} it must be a string or a list of parts")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def check_tool_call_id(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Refuse a tool's answer without the id of its call."""
        if value is None and info.data.get("role") == "tool":
            raise ValueError("a message with role 'tool' needs it")
        return value

    @property
    def plain_text(self) -> str:
        """The content as one string; parts are joined by newlines."""
        return "\n".join(part.plain_text or "" for part in self.content or ())


class ReasoningOptions(WireRequest):
    """Another spelling of reasoning_effort."""

    effort: ReasoningEffort | None = None


def check_continuation(value: bool | None, info: ValidationInfo) -> bool | None:
    """Refuse to open a new turn and continue the last one at once."""
    if value and info.data.get("add_generation_prompt"):
        raise ValueError("it cannot be true together with add_generation_prompt")
    return value


class ChatRequest(Extensions, Beams, Structured, Sampling):
    """Body of POST /v1/chat/completions."""

    DIALECT = "chat"
    REFUSED: ClassVar[Mapping[str, Refused]] = {
        "prompt": Refused((), "chat takes messages; /v1/completions takes a prompt"),
        "add_special_tokens": Refused((False,), "the chat template writes the special tokens"),
    }

    messages: Annotated[list[ChatMessage], Wire(shapes_prompt=True)] = Field(
        min_length=1, max_length=MAX_MESSAGES, fail_fast=True
    )
    max_tokens: Annotated[
        int | None, Wire(aliases=("max_new_tokens", "max_output_tokens", "n_predict", "num_predict"))
    ] = Field(None, ge=1, lt=2**31, description="output tokens at most; default: what the context leaves")
    max_completion_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="the newer name of max_tokens; wins if both are given"
    )
    add_generation_prompt: Annotated[bool | None, Wire(neutral=(False,), shapes_prompt=True)] = Field(
        None, description="let the template open the assistant's turn; default true"
    )
    continue_final_message: Annotated[bool | None, Wire(neutral=(False,), shapes_prompt=True)] = Field(
        None, description="continue the last message instead of opening a turn; default false"
    )
    chat_template_kwargs: Annotated[dict[str, Any] | None, Wire(neutral=({},), shapes_prompt=True)] = Field(
        None, max_length=64, description="further variables for the chat template"
    )
    documents: Annotated[list[dict[str, Any]] | None, Wire(neutral=([],), shapes_prompt=True)] = Field(
        None, fail_fast=True, description="documents for the chat template"
    )
    reasoning_effort: Annotated[ReasoningEffort | None, Wire(shapes_prompt=True)] = Field(
        None, description="given to the chat template; none also sets enable_thinking to false"
    )
    reasoning: Annotated[ReasoningOptions | None, Wire(neutral=({},), shapes_prompt=True)] = None
    logprobs: Annotated[bool | None, Wire(neutral=(False,))] = Field(
        None, description="return the logprob of each token; default false"
    )
    top_logprobs: Annotated[int | None, Wire(neutral=(0,))] = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="with logprobs, also return the top N at each position; default 0",
    )
    prompt_logprobs: int | None = PROMPT_LOGPROBS
    return_tokens_as_token_ids: Annotated[bool | None, Wire(neutral=(False,))] = Field(
        None, description="spell the tokens of logprobs as token_id:7; default false"
    )
    return_token_ids: Annotated[bool | None, Wire(neutral=(False,))] = Field(
        None, description="return the ids of the prompt's and all sampled tokens; default false"
    )

    include_reasoning: Annotated[bool | None, Wire(neutral=(True,))] = Field(
        None, description="show the reasoning; default true"
    )
    separate_reasoning: Annotated[bool | None, Wire(neutral=(False,))] = Field(
        None, description="take the reasoning out of the content; default true"
    )
    tools: Annotated[
        list[Tool] | None,
        Wire(neutral=([],), shapes_prompt=True),
        leave_out_tools(("function", None), "function"),
    ] = Field(
        None,
        max_length=MAX_TOOLS,
        description="functions that the model may call; an empty list is none; tools of other types are "
        "left out",
    )
    tool_choice: Annotated[Choice | None, Wire(neutral=("none", "auto"), shapes_prompt=True)] = Field(
        None,
        description="none, auto, required, one tool by name, allowed_tools; default auto if there are tools",
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false ends the answer after its first call; default true"
    )
    _check_prompt_logprobs = field_validator("prompt_logprobs")(check_prompt_logprobs)
    _check_continuation = field_validator("continue_final_message")(check_continuation)

    @field_validator("top_logprobs")
    @classmethod
    def check_top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        """Refuse top_logprobs without logprobs."""
        if value and not info.data.get("logprobs"):
            raise ValueError("it needs logprobs to be true")
        return value

    @field_validator("tools")
    @classmethod
    def check_tool_names(cls, value: list[Tool] | None) -> list[Tool] | None:
        """Refuse two tools of one name."""
        names = [tool.function.name for tool in value or ()]
        if len(set(names)) < len(names):
            raise ValueError("the names of tools must differ")
        return value

    @property
    def limit(self) -> tuple[int | None, str]:
        """Return the requested number of output tokens, and the field it is in."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """Return the number of top logprobs at each position; None without logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Return the number of top logprobs at each position of the prompt; None without."""
        return self.prompt_logprobs

    @property
    def num_samples(self) -> int:
        """Continuations computed for the conversation."""
        return self.n or 1


class AssistantMessage(WireResponse):
    """The answer. It has reasoning and tool calls only if there are any."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[AnswerToolCall] | None = None


class ChatChoice(WireResponse):
    """One of the n answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish
    stop_reason: str | int | None = Field(
        None, description="the stop string or token id that ended the answer"
    )
    token_ids: list[int] | None = Field(
        None, exclude_if=is_none, description="with return_token_ids: of all sampled tokens, shown or not"
    )


class ChatResponse(WireResponse):
    """Answer of POST /v1/chat/completions without `stream`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = Field(
        None, exclude_if=is_none, description="only with return_token_ids"
    )
    prompt_logprobs: PromptLogprobs | None = Field(
        None,
        exclude_if=is_none,
        description="only if requested: the candidates at each position, by token id",
    )


class ChatDelta(WireResponse):
    """The part of the message in this chunk: the role comes once, first."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(WireResponse):
    """The part of a chunk that belongs to one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
    stop_reason: str | int | None = Field(None, description="only in the chunk that ends the answer")
    token_ids: list[int] | None = Field(None, description="only with return_token_ids")


class ChatChunk(WireResponse):
    """One event of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = Field(None, description="null until the last chunk; only with include_usage")
    prompt_token_ids: list[int] | None = Field(
        None, description="in the role chunk, only with return_token_ids"
    )
