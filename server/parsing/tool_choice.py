"""Reads `tools` and `tool_choice` of a chat: which tools the prompt lists, and which may be called."""

from collections.abc import Sequence

from engine.errors import InvalidRequest
from server.parsing.detect import Formats, has_place_for_tools
from server.parsing.formats import tool_formats
from server.parsing.formats.hermes import HermesParser
from server.parsing.parser import ToolParser, Tools
from server.parsing.tools_in_prompt import can_ask_for
from server.schema.chat import ChatRequest
from server.schema.refused_fields import UnsupportedField
from server.schema.tools import FunctionDefinition, Tool, ToolChoice, is_none_allowed


def offered_tools(wire: ChatRequest) -> Sequence[Tool]:
    """Return the tools that the prompt lists: none if none may be called, so that the model calls none."""
    return () if is_none_allowed(wire.tool_choice) else wire.tools or ()


def check_choice(wire: ChatRequest) -> None:
    """Check that a choice names tools of the request. Raises InvalidRequest."""
    choice = wire.tool_choice
    if choice is None or is_none_allowed(choice) or (choice.type == "auto" and not wire.tools):
        return
    if not wire.tools:
        raise InvalidRequest(
            "tool_choice needs tools to choose from: functions of the client. Tools that the "
            "server does not have are left out and cannot be demanded.",
            "tool_choice",
        )
    names = {tool.function.name for tool in wire.tools}
    for name in chosen_names(choice):
        if name not in names:
            raise InvalidRequest(
                f"tool_choice names {name[:128]!r}, which is not in tools or is no function of the client.",
                "tool_choice",
            )


def prompt_format(wire: ChatRequest, formats: Formats, template: str) -> type[ToolParser] | None:
    """Return the parser of the format in which a prompt shows calls; None if only the template knows it.

    For a request without tools it is that of earlier calls: Hermes' if the model's cannot be written. Raises
    UnsupportedField if tools of the request cannot be listed in the prompt, or their calls not be parsed.
    """
    parser = tool_formats().get(formats.tools or "")
    can_list = has_place_for_tools(template) or (parser is not None and can_ask_for(parser))
    if not offered_tools(wire):
        return parser if can_list else HermesParser
    if formats.tools is None:
        raise UnsupportedField(
            "tools cannot be called: the format in which this model calls them is not known here, "
            "or tool_parser is none.",
            "tools",
        )
    if not can_list:
        raise UnsupportedField(
            "tools have no place in this model's chat template, and only a template can write the format "
            f"{formats.tools}; with tool_parser auto they would be written into the messages.",
            "tools",
        )
    return parser


def is_forced(choice: ToolChoice | None) -> bool:
    """Return True if a tool must be called, which only a grammar can ensure."""
    if choice is None:
        return False
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        return choice.allowed_tools.mode == "required"
    return choice.type in ("required", "function")


def chosen_names(choice: ToolChoice) -> list[str]:
    """Return the names of the tools in a choice."""
    if choice.type == "function":
        return [name for name in (choice.name or (choice.function and choice.function.name),) if name]
    allowed = choice.allowed_tools.tools if choice.allowed_tools and choice.type == "allowed_tools" else ()
    return [tool.name for tool in allowed if tool.name]


def callable_tools(wire: ChatRequest) -> Tools | None:
    """Return the tools that calls are parsed with; None if no calls are parsed."""
    offered = offered_tools(wire)
    if not offered:
        return None
    choice = wire.tool_choice
    only = chosen_names(choice) if choice else []
    is_named = choice is not None and choice.type == "function"
    return Tools(
        {tool.function.name: tool.function.parameters or {} for tool in offered},
        only=frozenset(only) if only else None,
        parallel=wire.parallel_tool_calls is not False and not is_named,
        is_named=is_named,
        is_forced=is_forced(choice),
    )


def called_tools(wire: ChatRequest, tools: Tools) -> list[FunctionDefinition]:
    """Return the tools that may be called."""
    return [
        tool.function
        for tool in offered_tools(wire)
        if tools.only is None or tool.function.name in tools.only
    ]
