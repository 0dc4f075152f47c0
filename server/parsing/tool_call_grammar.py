"""Calls that must be made, or may be made in place of JSON -> the grammar that answers follow.

The grammars are in llguidance's Lark, with a JSON schema for the arguments of each tool. JSON is laid out as
models have learned to write it, one blank behind each comma and colon: no other blanks can be written.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.request import Grammar
from server.parsing.formats.hermes import CLOSE, OPEN
from server.parsing.formats.mistral import ARGS, TOOL_CALLS
from server.parsing.registry import ToolFormat, Whole
from server.schema.tools import FunctionDefinition

LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NO_PARAMETERS = {"properties": {}, "additionalProperties": False}
DEFINITIONS = ("$defs", "definitions")


def demanded_format(own: ToolFormat | Whole) -> ToolFormat:
    """The format that grammars have calls written in: the model's own if there is a grammar of it."""
    return own if own in ("llama3_json", "mistral") else "hermes"


def forced_call_grammar(
    tools: Sequence[FunctionDefinition], written: ToolFormat, tokens: Mapping[str, int], *, is_one: bool
) -> Grammar:
    """What an answer must be that calls one of `tools`, or, unless `is_one`, several, as `written`.

    `tokens` are the ids of the vocabulary's added tokens: a marker among them is that token, by its id, since
    text never spells a control token.
    """
    rules = call_rules(tools, written, tokens, is_one=is_one)
    return Grammar("lark", f"start: calls\n{rules}", param="tools", label="parameters of a tool")


def json_or_calls(
    grammar: Grammar,
    tools: Sequence[FunctionDefinition],
    written: ToolFormat,
    tokens: Mapping[str, int],
    *,
    is_one: bool,
) -> Grammar:
    """What an answer must be that is JSON, as `grammar` says, or calls, as forced_call_grammar() says."""
    rules = call_rules(tools, written, tokens, is_one=is_one, layout=grammar.json_options)
    return replace(grammar, or_calls=rules)


def call_rules(
    tools: Sequence[FunctionDefinition],
    written: ToolFormat,
    tokens: Mapping[str, int],
    *,
    is_one: bool,
    layout: Mapping[str, Any] | None = None,
) -> str:
    """The rules, of which the first is `calls`. `layout` is that of the JSON which they stand in place of."""

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
        f"calls: {around.format('call' if is_one else f'call ({between} call)*')}",
        f"call: {call}",
        "tool: " + " | ".join(f"tool{number}" for number in range(len(tools))),
    ]
    key = "parameters" if written == "llama3_json" else "arguments"
    for number, tool in enumerate(tools):
        arguments = {"type": "object", **(tool.parameters or NO_PARAMETERS)}
        if is_by_name:
            written_call = f"{json.dumps(tool.name)} {marker(ARGS)} {json_rule(tool, arguments, LAYOUT)}"
        elif written == "llama3_json" and layout is not None:
            written_call = json_rule(tool, call_schema(tool.name, arguments), layout)
        else:
            head = json.dumps(f'{{"name": "{tool.name}", "{key}": ')
            written_call = f'{head} {json_rule(tool, arguments, LAYOUT)} "}}"'
        rules.append(f"tool{number}: {written_call}")
    return "\n".join(rules)


def call_schema(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call of Llama's as JSON, told from an answer in JSON as it goes: no text begins one alone."""
    return {
        "type": "object",
        "properties": {
            "name": {"const": name},
            "parameters": {key: value for key, value in arguments.items() if key not in DEFINITIONS},
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
        **{key: arguments[key] for key in DEFINITIONS if key in arguments},  # where references look for them
    }


def json_rule(tool: FunctionDefinition, schema: dict[str, Any], layout: Mapping[str, Any]) -> str:
    """JSON of a schema. Only that of a strict tool has to be obeyed to the letter."""
    options = {**layout, "lenient": not tool.strict}
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
