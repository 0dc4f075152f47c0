"""Tools in chat: what a request offers and demands, calls of earlier turns, calls in an answer."""

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from server.schema.wire import Needed, TypedRequest, WireRequest

MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
NAME = r"^[A-Za-z0-9_.:/-]{1,128}$"


def check_object_schema(value: dict[str, Any]) -> dict[str, Any]:
    """Arguments are an object, whatever else their schema leaves unsaid."""
    kind = value.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        message = "the schema of a tool's arguments must be of type 'object', not {kind}"
        raise PydanticCustomError("object_schema", message, {"kind": repr(kind)})
    return value


ObjectSchema = Annotated[dict[str, Any], AfterValidator(check_object_schema)]


def leave_out_tools(types: Collection[str | None], *fields: str) -> BeforeValidator:
    """Return a validator of a list that leaves out tools which only some other server, or client, has.

    These are tools of a type not among `types`, the types of functions (None: none is given). A tool with
    all `fields` is a function with a wrong type: it stays, for the schema to refuse.
    """

    def is_left_out(tool: Any) -> bool:
        if not isinstance(tool, dict):
            return False
        kind = tool.get("type")
        is_function = kind in types if isinstance(kind, str | None) else True
        return not is_function and not all(field in tool for field in fields)

    def leave_out(value: Any) -> Any:
        return [tool for tool in value if not is_left_out(tool)] if isinstance(value, list) else value

    return BeforeValidator(leave_out)


class FunctionCall(WireRequest):
    """Name and arguments of a call the assistant made earlier; `arguments` is JSON in a string."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(WireRequest):
    """A tool call the assistant made earlier in the conversation; that of a custom tool as a function's."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    @model_validator(mode="before")
    @classmethod
    def as_function(cls, value: Any) -> Any:
        """Return the call of a custom tool as that of a function with the argument `input`."""
        custom = value.get("custom") if isinstance(value, dict) and value.get("type") == "custom" else None
        if not isinstance(custom, dict) or "input" not in custom:
            return value
        function = {"name": custom.get("name"), "arguments": {"input": custom["input"]}}
        return {"id": value.get("id"), "function": function}


class FunctionDefinition(WireRequest):
    """A function the model may call."""

    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: ObjectSchema | None = Field(
        None, description="JSON schema of the arguments, an object; default: there are none"
    )
    strict: bool | None = Field(
        None, description="a schema that cannot be obeyed to the letter is refused where a call is demanded"
    )

    @property
    def for_template(self) -> dict[str, Any]:
        """Return the fields that chat templates print, and no others."""
        definition: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            definition["description"] = self.description
        definition["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": definition}


class Tool(WireRequest):
    """A tool the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(WireRequest):
    """A function by its name."""

    name: str


class ToolName(WireRequest):
    """A tool by its name, which may also be beside the type."""

    type: Literal["function"]
    function: FunctionName | None = None
    name: str | None = Field(None, validate_default=True)

    @field_validator("name")
    @classmethod
    def check_name(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Take the name from either of its two places."""
        function: FunctionName | None = info.data.get("function")
        if value is None and function is None:
            raise PydanticCustomError("missing", "the tool's name is needed, as function.name")
        return function.name if value is None and function else value


def check_any_allowed(tools: list[ToolName], info: ValidationInfo) -> list[ToolName]:
    """Refuse to demand a call of tools that are all left out."""
    if not tools and info.data.get("mode") == "required":
        raise ValueError("none of these tools can be called here: only functions can")
    return tools


def explain_type(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check the type of a choice; say of another one that tools with it cannot be demanded."""
    try:
        return check(value)
    except ValidationError as error:
        message = "{reason} (tools of other types are left out and cannot be demanded)"
        reason = error.errors(include_url=False)[0]["msg"]
        raise PydanticCustomError("literal_error", message, {"reason": reason}) from None


ChoiceType = Annotated[
    Literal["none", "auto", "required", "function", "allowed_tools"], WrapValidator(explain_type)
]


def check_not_empty(value: Any) -> Any:
    """Refuse a list without tools; one may be empty after some are left out."""
    if value == []:
        raise ValueError("names no tool")
    return value


AllowedNames = Annotated[
    list[ToolName],
    Field(max_length=MAX_TOOLS),
    AfterValidator(check_any_allowed),
    leave_out_tools(("function",), "function"),
    BeforeValidator(check_not_empty),
]


class AllowedTools(WireRequest):
    """A part of the tools, and whether one of them has to be called."""

    mode: Literal["auto", "required"]
    tools: AllowedNames


class ToolChoice(TypedRequest):
    """Which tools may or must be called: a word, one tool by name, or some."""

    type: ChoiceType
    name: str | None = None
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    NEEDED: ClassVar[Needed] = {"allowed_tools": ("allowed_tools",)}

    @field_validator("function")
    @classmethod
    def check_function(cls, value: FunctionName | None, info: ValidationInfo) -> FunctionName | None:
        """The type function names one, here or beside the type."""
        if value is None and info.data.get("type") == "function" and not info.data.get("name"):
            raise PydanticCustomError("missing", "a choice of type 'function' needs function.name")
        return value


def as_choice(value: Any) -> Any:
    """The two spellings of a choice as one: a word is a type."""
    return {"type": value} if isinstance(value, str) else value


def allow_word(schema: dict[str, Any]) -> None:
    """Add the spellings that as_choice() takes to the JSON schema."""
    choice = dict(schema)
    schema.clear()
    schema["anyOf"] = [{"enum": ["none", "auto", "required"]}, choice]


Choice = Annotated[ToolChoice, Field(json_schema_extra=allow_word), BeforeValidator(as_choice)]


def is_none_allowed(choice: ToolChoice | None) -> bool:
    """Return True if no tool may be called: all that the choice allows may have been left out."""
    if choice is None:
        return False
    is_empty = choice.type == "allowed_tools" and choice.allowed_tools and not choice.allowed_tools.tools
    return choice.type == "none" or bool(is_empty)


class AnswerPart(BaseModel):
    """Root of the parts of an answer."""

    model_config = ConfigDict(frozen=True)


class AnswerFunction(AnswerPart):
    """The called function, with its arguments as JSON in a string."""

    name: str
    arguments: str


class AnswerToolCall(AnswerPart):
    """A call the model makes."""

    id: str
    type: Literal["function"] = "function"
    function: AnswerFunction


class FunctionDelta(AnswerPart):
    """The name comes once, first; then more of the arguments."""

    name: str | None = None
    arguments: str


class ToolCallDelta(AnswerPart):
    """The part of call `index` in a chunk: id, type and name come once, first."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta
