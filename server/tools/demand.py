"""A choice that demands a call -> the grammar that answers follow: calls, in a format of the model.

The grammars are in llguidance's Lark, with a JSON schema for the arguments of each tool. JSON is laid out as
models have learned to write it, one blank behind each comma and colon: no other blanks can be written.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.request import Grammar
from server.schema.tools import FunctionDefinition
from server.tools.hermes import CLOSE, OPEN
from server.tools.mistral import ARGS, TOOL_CALLS
from server.tools.registry import ToolFormat, Whole

LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def demanded_format(own: ToolFormat | Whole) -> ToolFormat:
    """The format that demanded calls are written in: the model's own if there is a grammar of it."""
    return own if own in ("llama3_json", "mistral") else "hermes"


def demand_grammar(
    tools: Sequence[FunctionDefinition], written: ToolFormat, tokens: Mapping[str, int], *, is_one: bool
) -> Grammar:
    """What an answer must be that calls one of `tools`, or, unless `is_one`, several, as `written`.

    `tokens` are the ids of the vocabulary's added tokens: a marker among them is that token, by its id, since
    text never spells a control token.
    """

    def marker(text: str) -> str:
        return f"<[{tokens[text]}]>" if text in tokens else json.dumps(text)

    is_by_name = written == "mistral" and ARGS in tokens
    if is_by_name:
        call, between, around = f"{marker(TOOL_CALLS)} tool", "", "{}"
    elif written == "mistral":
        call, between, around = "tool", '", "', f'{marker(TOOL_CALLS)} "[" {{}} "]"'
    elif written == "llama3_json":
        call, between, around = "tool", '"; "', "{}"
    else:
        call, between, around = f'{marker(OPEN)} "\\n" tool "\\n" {marker(CLOSE)}', '"\\n"', "{}"
    rules = [
        f"start: {around.format('call' if is_one else f'call ({between} call)*')}",
        f"call: {call}",
        "tool: " + " | ".join(f"tool{number}" for number in range(len(tools))),
    ]
    key = "parameters" if written == "llama3_json" else "arguments"
    for number, tool in enumerate(tools):
        if is_by_name:
            rules.append(f"tool{number}: {json.dumps(tool.name)} {marker(ARGS)} arguments{number}")
        else:
            head = json.dumps(f'{{"name": "{tool.name}", "{key}": ')
            rules.append(f'tool{number}: {head} arguments{number} "}}"')
        rules.append(f"arguments{number}: %json {json.dumps(arguments_schema(tool), ensure_ascii=False)}")
    return Grammar("lark", "\n".join(rules), param="tools", label="parameters of a tool")


def arguments_schema(tool: FunctionDefinition) -> dict[str, Any]:
    """The schema of the arguments, which are an object. Only a strict one has to be obeyed to the letter."""
    schema = tool.parameters or {"properties": {}, "additionalProperties": False}
    return {"type": "object", **schema, "x-guidance": LAYOUT | {"lenient": not tool.strict}}
