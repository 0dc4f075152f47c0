"""`tools` and `tool_choice` of a chat -> the tools its prompt names, and what of them may be called."""

from collections.abc import Sequence

from engine.errors import InvalidRequest
from server.errors import UnsupportedField
from server.schema.chat import ChatRequest
from server.schema.tools import Tool, ToolChoice
from server.tools.parser import Tools


def offered_tools(wire: ChatRequest) -> Sequence[Tool]:
    """The tools that the prompt names: with the choice none it names none, so that the model calls none."""
    return () if wire.tool_choice and wire.tool_choice.type == "none" else wire.tools or ()


def check_choice(wire: ChatRequest) -> None:
    """A choice is among tools that are there, and can be kept. Raises InvalidRequest, UnsupportedField."""
    choice = wire.tool_choice
    if choice is None or choice.type == "none" or (choice.type == "auto" and not wire.tools):
        return
    if not wire.tools:
        raise InvalidRequest("tool_choice needs tools to choose from.", "tool_choice")
    names = {tool.function.name for tool in wire.tools}
    for name in chosen_names(choice):
        if name not in names:
            raise InvalidRequest(f"tool_choice names {name[:128]!r}, which is not in tools.", "tool_choice")
    if is_demand(choice):
        raise UnsupportedField(
            "tool_choice cannot force a call yet; use none, auto, or allowed_tools in the mode auto.",
            "tool_choice",
        )


def is_demand(choice: ToolChoice) -> bool:
    """Whether a tool must be called: only a grammar can see to that."""
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        return choice.allowed_tools.mode == "required"
    return choice.type in ("required", "function")


def chosen_names(choice: ToolChoice) -> list[str]:
    """The tools a choice names."""
    if choice.type == "function":
        return [name for name in (choice.name or (choice.function and choice.function.name),) if name]
    allowed = choice.allowed_tools.tools if choice.allowed_tools and choice.type == "allowed_tools" else ()
    return [tool.name for tool in allowed if tool.name]


def callable_tools(wire: ChatRequest) -> Tools | None:
    """What calls are parsed by; None if the answer has none."""
    offered = offered_tools(wire)
    if not offered:
        return None
    choice = wire.tool_choice
    only = chosen_names(choice) if choice and choice.type == "allowed_tools" else None
    return Tools(
        {tool.function.name: tool.function.parameters or {} for tool in offered},
        only=None if only is None else frozenset(only),
        parallel=wire.parallel_tool_calls is not False,
    )
