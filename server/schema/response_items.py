"""The items of a response's input: what was said, thought, called and returned so far."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from server.schema.chat import MAX_MESSAGES, MAX_PARTS, allow_string, as_parts
from server.schema.wire import Needed, TypedRequest

STATELESS = "nothing is stored; send the whole conversation"
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
# Items of tools that other servers run, and notes of clients to themselves. They hold nothing for a prompt.
LEFT_OUT = frozenset(
    (
        *("code_interpreter_call", "file_search_call", "image_generation_call", "web_search_call"),
        *("mcp_approval_request", "mcp_approval_response", "mcp_list_tools"),
        *("ghost_snapshot", "tool_search_call", "tool_search_output"),
    )
)
# Calls of tools that clients run beside functions, and the field that holds the arguments of each.
CLIENT_CALLS: Mapping[str, str] = {
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
}


class InputPart(TypedRequest):
    """One part of an item's content. The served model reads text; other kinds are refused by name."""

    type: Literal[
        "input_text",
        "output_text",
        "text",
        "refusal",
        "reasoning_text",
        "summary_text",
        "input_image",
        "input_file",
        "input_audio",
    ]
    text: str | None = None
    refusal: str | None = None

    NEEDED: ClassVar[Needed] = dict.fromkeys(TEXT_PARTS, ("text",)) | {"refusal": ("refusal",)}

    @field_validator("type")
    @classmethod
    def check_type(cls, value: str) -> str:
        """Refuse parts that hold no text."""
        if value not in cls.NEEDED:
            raise ValueError(f"parts of type {value!r} are not supported by this model; send text")
        return value

    @property
    def plain_text(self) -> str:
        """The text this part adds to the prompt."""
        return (self.refusal if self.type == "refusal" else self.text) or ""


Parts = Annotated[
    list[InputPart],
    Field(max_length=MAX_PARTS, fail_fast=True, json_schema_extra=allow_string),
    BeforeValidator(as_parts),
]


def refuse_reference(value: Any) -> Any:
    """Refuse the reference to an item of an earlier response, with what to send in its place."""
    if value == "item_reference":
        raise ValueError(f"{STATELESS}: each item itself instead of its id, as clients do with store false")
    return value


class InputItem(TypedRequest):
    """One item of the conversation: a message, a call of a function, its result, or earlier reasoning.

    Calls of other tools and their results become those of functions: a model reads what was done, though
    the tool cannot be offered to it here.
    """

    type: Annotated[
        Literal[
            "message",
            "function_call",
            "function_call_output",
            "reasoning",
            "custom_tool_call",
            "custom_tool_call_output",
            "local_shell_call",
            "local_shell_call_output",
            "shell_call",
            "shell_call_output",
            "apply_patch_call",
            "apply_patch_call_output",
            "mcp_call",
            "code_interpreter_call",
            "file_search_call",
            "image_generation_call",
            "web_search_call",
            "mcp_approval_request",
            "mcp_approval_response",
            "mcp_list_tools",
            "ghost_snapshot",
            "tool_search_call",
            "tool_search_output",
        ],
        BeforeValidator(refuse_reference),
    ] = "message"
    role: Literal["developer", "system", "user", "assistant"] | None = Field(None, description="of a message")
    content: Parts | None = Field(None, description="of a message, or of reasoning")
    id: str | None = Field(None, description="of an mcp_call; that of a local_shell call and its output")
    call_id: str | None = Field(None, description="of a call and its output")
    name: str | None = Field(None, description="of a function_call, custom_tool_call or mcp_call")
    arguments: str | None = Field(None, description="of a function_call or mcp_call: JSON in a string")
    input: str | None = Field(None, description="of a custom_tool_call")
    action: dict[str, Any] | None = Field(None, description="of a shell_call or local_shell_call")
    operation: dict[str, Any] | None = Field(None, description="of an apply_patch_call")
    output: Parts | None = Field(None, description="of an output, or of an mcp_call")

    NEEDED: ClassVar[Needed] = {
        "message": ("role", "content"),
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
        "custom_tool_call": ("call_id", "name", "input"),
        "custom_tool_call_output": ("call_id", "output"),
        "local_shell_call": ("action",),
        "local_shell_call_output": ("output",),
        "shell_call": ("call_id", "action"),
        "shell_call_output": ("call_id", "output"),
        "apply_patch_call": ("call_id", "operation"),
        "apply_patch_call_output": ("call_id",),
        "mcp_call": ("id", "name", "arguments"),
    }

    @field_validator("output", mode="before")
    @classmethod
    def as_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Return the streams of a shell as JSON."""
        if info.data.get("type") != "shell_call_output" or not isinstance(value, list):
            return value
        try:
            return orjson.dumps(value).decode()
        except TypeError as error:  # nested too deep
            raise ValueError(str(error)) from None

    @property
    def is_output(self) -> bool:
        """Return True for the result of a call."""
        return self.type.endswith("_output")

    @property
    def call(self) -> dict[str, Any] | None:
        """Return the call as chat has it; None for an item that is none."""
        if self.type in ("function_call", "mcp_call"):
            arguments: Any = self.arguments
        elif field := CLIENT_CALLS.get(self.type):
            value = getattr(self, field)
            arguments = {field: value} if isinstance(value, str) else value
        else:
            return None
        name = self.name or self.type.removesuffix("_call")
        return {"id": self.call_id or self.id, "function": {"name": name, "arguments": arguments}}


def as_items(value: Any) -> Any:
    """The two spellings of input as one: a string is a message of the user.

    Of items that hold nothing for a prompt only the type is kept, so that errors name the right item.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [{"type": item["type"]} if _is_left_out(item) else item for item in value[: MAX_MESSAGES + 1]]


def _is_left_out(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("type"), str) and item["type"] in LEFT_OUT
