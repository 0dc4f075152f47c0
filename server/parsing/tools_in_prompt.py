"""Renders tools into the messages, in Hermes' format, for chat templates without tool support.

Such templates leave out the tools, the calls of earlier turns, and sometimes the role of their results. Here
these become text of the system, assistant and user turns.
"""

import json
from collections.abc import Sequence
from typing import Any

from server.parsing.formats.hermes import CLOSE, OPEN

INSTRUCTIONS = (
    "You can call functions. These are the functions, one JSON object a line:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call one, write its name and its arguments as JSON between tags, and nothing else after it:\n"
    + OPEN
    + '\n{{"name": "the function", "arguments": {{"parameter": "value"}}}}\n'
    + CLOSE
    + "\nTo call several, write that once for each. The results come between <tool_response> tags. "
    "Call a function only if it helps; otherwise answer."
)


def render_tools(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation with tools, calls and results as text."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if turns and turns[-1].get("is_result"):
                turns[-1]["content"] += "\n" + text
            else:
                turns.append({"role": "user", "content": text, "is_result": True})
            continue
        turn = dict(message)
        calls = [call_text(call["function"]) for call in turn.pop("tool_calls", ())]
        turn["content"] = "\n".join(text for text in (turn["content"], *calls) if text)
        turns.append(turn)
    for turn in turns:
        turn.pop("is_result", None)
    if tools:
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        text = INSTRUCTIONS.format(tools=listed)
        if turns and turns[0]["role"] in ("system", "developer"):
            turns[0] = {**turns[0], "content": "\n\n".join(filter(None, (turns[0]["content"], text)))}
        else:
            turns.insert(0, {"role": "system", "content": text})
    return turns


def call_text(function: dict[str, Any]) -> str:
    """Return a call of an earlier turn, in the format the model is asked to use."""
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}"
