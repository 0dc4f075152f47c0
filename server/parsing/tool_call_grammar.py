"""Grammars of answers that must be tool calls, or may be tool calls in place of JSON.

The grammars are in llguidance's Lark, with a JSON schema for the arguments of each tool. JSON is laid out as
models have learned to write it, with one space after each comma and colon and no other whitespace.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from engine.request import Grammar
from server.schema.tools import FunctionDefinition

LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NO_PARAMETERS = {"properties": {}, "additionalProperties": False}

Layout = Mapping[str, Any]


class NoGrammar(Exception):
    """A format has no grammar of calls that follow the schema of a tool."""


class CallRules(NamedTuple):
    """How a format writes calls, in pieces of Lark rules.

    `call` is one call, with the rule `tool` in it; several are joined by `separator`, None if an answer has
    only one, and replace the `{}` of `around`. `tool(function, layout)` returns the body of the rule for a
    call of `function`; `layout` is that of the JSON answer which calls may take the place of, None if the
    answer must be calls. It may raise NoGrammar. Lines after the first of `call` are rules that it uses.

    A format whose answers have headers has a `frame`: the rule `start` of a whole output with its reasoning,
    and rules for it; `{}` is the place of the calls, or of `answer`, which has the rule `answer` in it.
    """

    call: str
    separator: str | None
    tool: Callable[[FunctionDefinition, Layout | None], str]
    around: str = "{}"
    frame: str = ""
    answer: str = "answer"

    def start(self, *alternatives: str) -> str:
        """Return the rule of an output that is one of `alternatives`."""
        return (self.frame or "start: {}").format(" | ".join(alternatives))


def forced_call_grammar(rules: CallRules, tools: Sequence[FunctionDefinition], *, is_one: bool) -> Grammar:
    """Return the grammar of an answer that is one call of `tools`, or several unless `is_one`."""
    source = f"{rules.start('calls')}\n{lark_rules(rules, tools, is_one=is_one)}"
    return Grammar(
        "lark",
        source,
        includes_reasoning=bool(rules.frame),
        param="tools",
        label="parameters of a tool",
    )


def framed_answer(grammar: Grammar, rules: CallRules) -> Grammar:
    """Return the grammar of a whole output whose answer is what `grammar` says."""
    return replace(grammar, around=rules.start(rules.answer), includes_reasoning=True)


def json_or_calls(
    grammar: Grammar, rules: CallRules, tools: Sequence[FunctionDefinition], *, is_one: bool
) -> Grammar:
    """Return the grammar of an answer that is JSON, as `grammar` says, or calls."""
    source = lark_rules(rules, tools, is_one=is_one, layout=grammar.json_options)
    return replace(
        grammar,
        around=f"{rules.start(rules.answer, 'calls')}\n{source}",
        includes_reasoning=bool(rules.frame),
    )


def lark_rules(
    rules: CallRules, tools: Sequence[FunctionDefinition], *, is_one: bool, layout: Layout | None = None
) -> str:
    """Return Lark rules, the first of which is `calls`."""
    is_one = is_one or rules.separator is None
    calls = "call" if is_one else f"call ({rules.separator} call)*"
    lines = [
        "calls: " + rules.around.format(calls),
        f"call: {rules.call}",
        "tool: " + " | ".join(f"tool{number}" for number in range(len(tools))),
    ]
    lines += (f"tool{number}: {rules.tool(function, layout)}" for number, function in enumerate(tools))
    return "\n".join(lines)


def marker_rule(text: str, tokens: Mapping[str, int]) -> str:
    """Return the Lark for a marker: by its id if it is a control token, which no text spells."""
    return f"<[{tokens[text]}]>" if text in tokens else json.dumps(text)


def marked_rule(text: str, markers: Collection[str], tokens: Mapping[str, int]) -> str:
    """Return the Lark for text in which those of `markers` that are control tokens are named by id."""
    names = "|".join(re.escape(name) for name in markers if name in tokens) or "(?!)"
    return " ".join(marker_rule(part, tokens) for part in re.split(f"({names})", text) if part) or '""'


def json_call_rule(function: FunctionDefinition, name: str = "name", arguments: str = "arguments") -> str:
    """Return the Lark for {"name": …, "arguments": {…}}, with the keys `name` and `arguments`."""
    head = json.dumps(f'{{"{name}": "{function.name}", "{arguments}": ')
    return f'{head} {arguments_rule(function)} "}}"'


def arguments_rule(function: FunctionDefinition) -> str:
    """Return the Lark for the arguments of a call."""
    return json_rule(function, arguments_schema(function), LAYOUT)


def arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    """Return the JSON schema of the arguments; they are an object."""
    return {"type": "object", **(function.parameters or NO_PARAMETERS)}


def json_rule(function: FunctionDefinition, schema: dict[str, Any], layout: Layout) -> str:
    """Return the Lark for JSON of a schema; only for a strict function must all of it be enforceable."""
    options = {**layout, "lenient": not function.strict}
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
