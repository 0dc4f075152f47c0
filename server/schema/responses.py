"""POST /v1/responses of the OpenAI API, without state on the server: request and response."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from engine.readouts import MAX_LOGPROBS
from server.schema.chat import MAX_MESSAGES, ReasoningEffort, allow_string
from server.schema.foreign import SEPARATE, TURNS, prompt_field
from server.schema.logprobs import TokenLogprob, in_turns
from server.schema.refused_fields import Refused
from server.schema.response_items import STATELESS, InputItem, as_items
from server.schema.sampling import Sampling, StreamOptions
from server.schema.tools import (
    MAX_TOOLS,
    NAME,
    AllowedNames,
    ChoiceType,
    ObjectSchema,
    allow_word,
    as_choice,
    leave_out_tools,
)
from server.schema.wire import Needed, TypedRequest, Wire, WireRequest, WireResponse, check_entries

LOGPROBS_INCLUDED = "message.output_text.logprobs"
MAX_METADATA = 16


class Reasoning(WireRequest):
    """Effort of the reasoning. Summaries are not made."""

    effort: ReasoningEffort | None = Field(
        None, description="given to the chat template; none also sets enable_thinking to false"
    )


class TextFormat(WireRequest):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=512)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def check_schema(self) -> "TextFormat":
        """The type says whether there must be one."""
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("the type json_schema needs a schema")
        return self


class TextOptions(WireRequest):
    """Options of the answer's text."""

    format: TextFormat | None = None


class InputTool(TypedRequest):
    """A function the model may call."""

    type: Literal["function"]
    name: str | None = Field(None, pattern=NAME)
    description: str | None = None
    parameters: ObjectSchema | None = Field(
        None, description="JSON schema of the arguments, an object; default: there are none"
    )
    strict: bool | None = Field(
        None, description="a schema that cannot be obeyed to the letter is refused where a call is demanded"
    )

    NEEDED: ClassVar[Needed] = {"function": ("name",)}

    @property
    def for_chat(self) -> dict[str, Any]:
        """Return the tool as chat has it."""
        function = self.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
        return {"type": "function", "function": function}


class InputChoice(TypedRequest):
    """Which tools may or must be called: a word, one function by name, or some."""

    type: ChoiceType
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: AllowedNames | None = None

    NEEDED: ClassVar[Needed] = {"function": ("name",), "allowed_tools": ("mode", "tools")}

    @property
    def for_chat(self) -> dict[str, Any]:
        """Return the choice as chat has it."""
        if self.type == "allowed_tools" and not self.tools:
            return {"type": "none"}
        if self.type == "allowed_tools":
            names = [{"type": "function", "function": {"name": tool.name}} for tool in self.tools or ()]
            return {"type": self.type, "allowed_tools": {"mode": self.mode, "tools": names}}
        return {"type": self.type, "name": self.name}


class ResponsesRequest(Sampling):
    """Body of POST /v1/responses. The sampling fields of chat that Responses does not know are extensions."""

    DIALECT = "responses"
    REFUSED: ClassVar[Mapping[str, Refused]] = {
        "previous_response_id": prompt_field(hint=STATELESS),
        "conversation": prompt_field(hint=STATELESS),
        "background": Refused((False,), STATELESS),
        "prompt": Refused((), "send instructions and input"),
        "max_tool_calls": Refused((), "no tool is run here; parallel_tool_calls false allows one call"),
        "n": Refused((1,), "a response is one answer"),
        "messages": Refused((), "send input"),
        "max_tokens": Refused((), "use max_output_tokens"),
        "max_completion_tokens": Refused((), "use max_output_tokens"),
        "response_format": Refused(({"type": "text"},), "use text.format"),
        "reasoning_effort": Refused((), "use reasoning.effort"),
        "add_generation_prompt": TURNS,
        "separate_reasoning": SEPARATE,
    }

    input: Annotated[
        list[InputItem],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True, json_schema_extra=allow_string),
        BeforeValidator(as_items),
    ]
    instructions: str | None = Field(None, description="a system message in front of the input")
    max_output_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="output tokens at most; default: what the context leaves"
    )
    reasoning: Reasoning | None = None
    text: Annotated[TextOptions | None, Wire(neutral=({}, {"format": {"type": "text"}}))] = None
    truncation: Annotated[Literal["disabled"] | None, Wire(neutral=("disabled",), shapes_prompt=True)] = (
        Field(None, description="a prompt that is too long is an error")
    )
    include: Annotated[list[str] | None, Wire(neutral=([],))] = Field(
        None,
        max_length=32,
        description=f"{LOGPROBS_INCLUDED} returns the logprob of each token of the text; all else is "
        "returned anyway",
    )
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="with logprobs, also return the top N at each position; default 0",
    )
    metadata: Annotated[dict[str, str] | None, check_entries(MAX_METADATA)] = Field(
        None, max_length=MAX_METADATA, description="given back with the response"
    )
    tools: Annotated[list[InputTool] | None, leave_out_tools(("function", None), "name", "parameters")] = (
        Field(
            None,
            max_length=MAX_TOOLS,
            description="functions that the model may call; an empty list is none; tools of other types are "
            "left out, and the response's tools are those that are left",
        )
    )
    tool_choice: (
        Annotated[InputChoice, Field(json_schema_extra=allow_word), BeforeValidator(as_choice)] | None
    ) = Field(None, description="default auto if there are tools")
    parallel_tool_calls: bool | None = Field(
        None, description="false ends the answer after its first call; default true"
    )

    @field_validator("stream_options")
    @classmethod
    def check_stream_options(cls, value: StreamOptions | None) -> StreamOptions | None:
        """Refuse counts in each event: the last one always has them."""
        if value and value.continuous_usage_stats:
            raise ValueError("continuous_usage_stats is not supported: the last event has the token counts")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def check_top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        """Refuse top_logprobs without logprobs."""
        if value and LOGPROBS_INCLUDED not in (info.data.get("include") or ()):
            raise ValueError(f"it needs {LOGPROBS_INCLUDED} among include")
        return value

    @property
    def wants_logprobs(self) -> bool:
        """Return True if the text should have its logprobs."""
        return LOGPROBS_INCLUDED in (self.include or ())


# Of the tokens of a text, if they are requested.
TextLogprobs = Annotated[list[TokenLogprob], in_turns(TokenLogprob)]


class OutputText(WireResponse):
    """Text of the answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[None] = Field(default_factory=list, max_length=0)
    logprobs: TextLogprobs = Field(default_factory=list)


class ReasoningText(WireResponse):
    """Reasoning of the model."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputReasoning(WireResponse):
    """Reasoning before the answer, without a summary."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    status: ItemStatus
    summary: list[None] = Field(default_factory=list, max_length=0)
    content: list[ReasoningText]


class OutputCall(WireResponse):
    """A call of a function, with its arguments as JSON in a string."""

    type: Literal["function_call"] = "function_call"
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class OutputMessage(WireResponse):
    """The answer."""

    type: Literal["message"] = "message"
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


OutputItem = OutputReasoning | OutputMessage | OutputCall


class InputDetails(WireResponse):
    """How many of the prompt's tokens were cached."""

    cached_tokens: int = Field(description="prompt tokens taken from the prefix cache")
    cache_write_tokens: int = 0


class OutputDetails(WireResponse):
    """How many of the output's tokens are reasoning."""

    reasoning_tokens: int


class ResponseUsage(WireResponse):
    """Token counts, from the engine's own ledger."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(WireResponse):
    """The reason why a response failed after it had begun."""

    code: Literal["server_error"] = "server_error"
    message: str


class IncompleteDetails(WireResponse):
    """The reason why an answer ended early."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class PlainText(WireResponse):
    """Free text."""

    type: Literal["text"] = "text"


class JsonObject(WireResponse):
    """Any JSON object."""

    type: Literal["json_object"] = "json_object"


class JsonSchema(WireResponse):
    """JSON that a schema describes."""

    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["json_schema"] = "json_schema"
    name: str | None
    description: str | None
    schema_: dict[str, Any] = Field(serialization_alias="schema")
    strict: bool


class TextSettings(WireResponse):
    """The form the text has."""

    format: PlainText | JsonObject | JsonSchema = PlainText()


class ReasoningSettings(WireResponse):
    """The requested effort."""

    effort: ReasoningEffort | None
    summary: None = None


class FunctionTool(WireResponse):
    """A function that could be called."""

    type: Literal["function"] = "function"
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool


class ResponseObject(WireResponse):
    """Answer of POST /v1/responses. The fields of the request come back as they were understood."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Annotated[OutputItem, Field(discriminator="type")]]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: ReasoningSettings
    store: Literal[False] = False
    temperature: float
    text: TextSettings = TextSettings()
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    tools: list[FunctionTool] = Field(default_factory=list)
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None
