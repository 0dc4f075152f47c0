"""Grammars of calls in tags: JSON where the schema of an argument wants it, else text up to the next tag."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from server.parsing.argument_types import STRING, argument_schemas, resolve, types_of
from server.parsing.tool_call_grammar import (
    LAYOUT,
    CallRules,
    Layout,
    NoGrammar,
    arguments_schema,
    json_rule,
    marked_rule,
)
from server.schema.tools import FunctionDefinition

if TYPE_CHECKING:
    from server.parsing.tagged_call import Tags

NOTES = frozenset(("title", "description", "default", "examples", "$comment", "deprecated"))
ROOT_KEYS = NOTES | {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
    "$schema",
}
KEY = re.compile(r"[^<>\"\n]+")


class TagRules:
    """Writes Lark rules for tags in which `markers`, where they are control tokens, are named by id."""

    def __init__(self, tags: "Tags", markers: Collection[str], tokens: Mapping[str, int]) -> None:
        self._tags = tags
        self._markers, self._tokens = markers, tokens

    def rules(self, opener: str, closer: str, *, shares_block: bool) -> CallRules:
        """Return the rules of calls, each between `opener` and `closer`, or all of them if they share those.

        An answer's text ends at the first tag that ends a value.
        """
        # A terminal of its own: what follows it may be a closing marker or the next call.
        gap = self.text("\n" if self._tags.function else "")
        around = f"{self.text(opener)} {gap} {{}} {gap} {self.text(closer)}"
        end = self._tags.end_value
        if end in self._tokens:
            value = f"value: VALUE {self.text(end)}\nVALUE: /(?s:.*)/"
        else:
            value = f"value[suffix={json.dumps(end)}]: /(?s:.*)/"
        if shares_block:
            return CallRules(f"tool\n{value}", self.text("\n"), self.tool, around)
        return CallRules(f"{around.format('tool')}\n{value}", self.text("\n"), self.tool)

    def tool(self, function: FunctionDefinition, layout: Layout | None) -> str:
        """Return the rule of a call. Raises NoGrammar if text cannot be made to follow the schema."""
        schema = arguments_schema(function)
        properties = argument_schemas(schema)
        is_open = schema.get("additionalProperties", True) is not False
        if not schema.keys() <= ROOT_KEYS or (is_open and not properties):
            raise NoGrammar
        required = schema.get("required") or ()
        if not isinstance(required, Sequence) or not set(required) <= properties.keys():
            raise NoGrammar
        parts = [self.text(f"{self._tags.function}{function.name}{self._tags.after_name}\n")]
        for key, value in properties.items():
            argument = self._argument(function, key, value, schema)
            parts.append(f"({argument})" + ("" if key in required else "?"))
        if self._tags.end_function:
            parts.append(self.text(self._tags.end_function))
        return " ".join(parts)

    def _argument(self, function: FunctionDefinition, key: str, value: Any, root: Mapping[str, Any]) -> str:
        """Return the rule of an argument, in its tags."""
        if not KEY.fullmatch(key):
            raise NoGrammar
        tags = self._tags
        gap = "\n" if tags.after_key else ""
        head = self.text(f"{tags.parameter}{key}{tags.after_key}{gap}{tags.value}{tags.newline}")
        return f"{head} {self._value(function, value, root)} {self.text(chr(10))}"

    def _value(self, function: FunctionDefinition, value: Any, root: Mapping[str, Any]) -> str:
        """Return the rule of a value with its end."""
        types = types_of(value, root)
        end = self.text(self._tags.newline + self._tags.end_value)
        if types and not types & STRING:
            definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
            return f"{json_rule(function, {**definitions, **value}, LAYOUT)} {end}"
        schema = resolve(value, root)
        if types != STRING or not schema.keys() <= NOTES | {"type", "enum", "const"}:
            raise NoGrammar
        if "const" in schema or "enum" in schema:
            choices = [schema["const"]] if "const" in schema else schema["enum"]
            if not all(isinstance(choice, str) and self._is_exact(choice) for choice in choices):
                raise NoGrammar
            return f"({' | '.join(json.dumps(choice) for choice in choices)}) {end}"
        return "value"

    def _is_exact(self, text: str) -> bool:
        """Return True if a value of `text` is read as it is written."""
        return bool(text) and self._tags.end_value not in text and text.strip("\n") == text

    def text(self, text: str) -> str:
        """Return the rule of `text`."""
        return marked_rule(text, self._markers, self._tokens)
