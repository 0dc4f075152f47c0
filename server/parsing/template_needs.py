"""Rewrites conversations for chat templates that read tools or earlier calls in a way of their own."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from server.parsing.detect import MAX_TEMPLATES
from server.parsing.formats.harmony import HarmonyParser
from server.parsing.formats.phi4_mini import CLOSE, OPEN

# A template names its variable, or a message's field, of this name.
FIELD = re.compile(r"""["']tools["']|\.tools\b""")
VARIABLE = re.compile(r"\btools\b")
SYSTEM = "You can call functions."
# Names of the variable that switches reasoning on or off.
SWITCHES = ("enable_thinking", "thinking", "reasoning")

Turns = list[dict[str, Any]]


def adapted(template: str, messages: Turns, tools: Sequence[dict[str, Any]]) -> Turns:
    """Return the messages as `template` can render them; `tools` may become part of a message."""
    if reads_tools_of_messages(template):
        return with_tools_in_system_turn(messages, tools)
    if HarmonyParser.is_shown_by(template):
        return [with_one_text(message) for message in messages]
    return messages


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
    """Return the conversation with tools as JSON in the system message, and calls as text of their turns."""
    turns: Turns = []
    for message in messages:
        turn = dict(message)
        calls = [call["function"] for call in turn.pop("tool_calls", ())]
        if calls:
            turn["content"] = f"{turn['content'] or ''}{OPEN}{json.dumps(calls, ensure_ascii=False)}{CLOSE}"
        turns.append(turn)
    if tools:
        if not turns or turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": SYSTEM})
        listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        turns[0] = {**turns[0], "tools": listed}
    return turns


def with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a turn with calls whose content is part of its reasoning.

    The template of gpt-oss renders one of them, as analysis before the call, and refuses a turn with both.
    """
    reasoning, content = message.get("reasoning_content"), message.get("content")
    if not (message.get("tool_calls") and reasoning and content):
        return message
    return {**message, "reasoning_content": f"{reasoning}\n\n{content}", "content": ""}
