"""Renders tools into the messages for chat templates that have no place for them.

Instructions show a call in the format that the template shows or the settings name, else in that of Hermes.
"""

import json
from collections.abc import Sequence
from typing import Any

from engine.control_tokens import OwnText, TextParts
from server.parsing.parser import ToolParser

INSTRUCTIONS = (
    "You can call functions. These are the functions, one JSON object a line:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call one, write its name and its arguments as here, and nothing else after it:\n"
)
RULES = (
    "\nTo call several, write that once for each. The results follow in the next message. "
    "Call a function only if it helps; otherwise answer."
)
EXAMPLE = {"name": "the_function", "arguments": {"parameter": "value"}}


def can_ask_for(parser: type[ToolParser]) -> bool:
    """Return True if instructions can show how calls are written in a format."""
    return parser.write_calls([EXAMPLE]) is not None


def with_instructions(
    turns: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]],
    parser: type[ToolParser],
    *,
    takes_system: bool,
) -> list[dict[str, Any]]:
    """Return the conversation with tools, and how to call them, in its first message.

    That is the system message or, if the template does not render one, the user's. The markers of the format
    are encoded as the control tokens that they are.
    """
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = (INSTRUCTIONS.format(tools=listed), OwnText(parser.write_calls([EXAMPLE])), RULES)
    roles = ("system", "developer") if takes_system else ("user",)
    if turns and turns[0]["role"] in roles:
        given = turns[0]["content"]
        return [{**turns[0], "content": TextParts((given + "\n\n" if given else "", *text))}, *turns[1:]]
    return [{"role": roles[0], "content": TextParts(text)}, *turns]
