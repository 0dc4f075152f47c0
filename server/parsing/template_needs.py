"""Rewrites conversations for chat templates that read tools or earlier calls in a way of their own."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from server.parsing.detect import MAX_TEMPLATES, has_place_for_tools
from server.parsing.formats.harmony import HarmonyParser
from server.parsing.parser import ToolParser

# A template names its variable, or a message's field, of this name.
FIELD = re.compile(r"""["']tools["']|\.tools\b""")
VARIABLE = re.compile(r"\btools\b")
# A turn of the assistant is rendered as its calls or as its content.
CALLS_OR_CONTENT = re.compile(r"'assistant' and message\['content'\] is (?:not )?none")
SYSTEM = "You can call functions."
# Names of the variable that switches reasoning on or off.
SWITCHES = ("enable_thinking", "thinking", "reasoning")

Turns = list[dict[str, Any]]


def adapted(
    template: str, messages: Turns, tools: Sequence[dict[str, Any]], parser: type[ToolParser] | None
) -> Turns:
    """Return the messages as `template` can render them; `tools` may become part of a message.

    Calls that it leaves out become text in the format of `parser`, if there is one.
    """
    if parser is not None and not renders_calls(template, parser):
        messages = with_calls_as_text(messages, parser)
        if not has_place_for_tools(template):
            messages = with_results_as_text(messages)
    elif CALLS_OR_CONTENT.search(template):
        messages = with_calls_apart(messages)
    if reads_tools_of_messages(template):
        return with_tools_in_system_turn(messages, tools)
    if HarmonyParser.is_shown_by(template):
        return [with_one_text(message) for message in messages]
    return messages


def renders_calls(template: str, parser: type[ToolParser]) -> bool:
    """Return True if a template renders calls of earlier turns, in the format in which they are parsed."""
    is_known = has_place_for_tools(template) or parser.is_shown_by(template)
    return is_known and "tool_calls" in template


def with_switch(template: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables with the switch of reasoning, if it is among them, as `template` calls it."""
    given = [variables[name] for name in SWITCHES if isinstance(variables.get(name), bool)]
    return {**dict.fromkeys(_switches_of(template), given[0]), **variables} if given else dict(variables)


@lru_cache(maxsize=MAX_TEMPLATES)
def _switches_of(template: str) -> tuple[str, ...]:
    """Return the names of the switch that a template reads."""
    return tuple(name for name in SWITCHES if re.search(rf"\b{name}\b", template))


@lru_cache(maxsize=MAX_TEMPLATES)
def reads_tools_of_messages(template: str) -> bool:
    """Return True if a template takes tools from the system message, as that of Phi-4-mini does."""
    return FIELD.search(template) is not None and VARIABLE.search(FIELD.sub("", template)) is None


def with_tools_in_system_turn(messages: Turns, tools: Sequence[dict[str, Any]]) -> Turns:
    """Return the conversation with tools as JSON in the system message."""
    turns = list(messages)
    if tools:
        if not turns or turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": SYSTEM})
        listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        turns[0] = {**turns[0], "tools": listed}
    return turns


def with_calls_as_text(messages: Turns, parser: type[ToolParser]) -> Turns:
    """Return the conversation with calls as part of their turns' text, where the format can be written."""
    turns: Turns = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        text = parser.write_calls(calls) if calls else None
        if text is not None:
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            message["content"] = "\n".join(filter(None, (message["content"], text)))
        turns.append(message)
    return turns


def with_results_as_text(messages: Turns) -> Turns:
    """Return the conversation with the results of calls, those in a row together, as turns of the user."""
    turns: Turns = []
    is_result = False  # the last turn
    for message in messages:
        if message["role"] != "tool":
            turns.append(message)
        else:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if is_result:
                turns[-1]["content"] += f"\n{text}"
            else:
                turns.append({"role": "user", "content": text})
        is_result = message["role"] == "tool"
    return turns


def with_calls_apart(messages: Turns) -> Turns:
    """Return the conversation with turns of calls that have no content: a turn of the text comes before."""
    turns: Turns = []
    for message in messages:
        if message.get("tool_calls"):
            if message["content"]:
                turns.append({key: value for key, value in message.items() if key != "tool_calls"})
            message = {**message, "content": None}
        turns.append(message)
    return turns


def with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a turn with calls whose content is part of its reasoning.

    The template of gpt-oss renders one of them, as analysis before the call, and refuses a turn with both.
    """
    reasoning, content = message.get("reasoning_content"), message.get("content")
    if not (message.get("tool_calls") and reasoning and content):
        return message
    return {**message, "reasoning_content": f"{reasoning}\n\n{content}", "content": ""}
