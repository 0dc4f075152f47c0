"""DeepSeek V3, R1 and V3.1: <｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>, in a section.

V3 and R1 write `function` for f, and the name after the separator, before a block of JSON in Markdown.
https://huggingface.co/deepseek-ai/DeepSeek-V3.1
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from server.parsing.named_call import NamedCallParser
from server.parsing.parser import Marker, Tools
from server.parsing.tool_call_grammar import CallRules, Layout, arguments_rule, marker_rule
from server.schema.tools import FunctionDefinition

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"


class DeepSeekParser(NamedCallParser):
    """The name is beside a separator."""

    name = "deepseek_v3"
    template_signs = (CALL,)
    markers = (BEGIN, END, CALL, CALL_END, SEPARATOR)
    section = (BEGIN, END)
    call = (CALL, CALL_END)

    def __init__(self, tools: Tools, marker: Marker) -> None:
        super().__init__(tools, marker)
        self._separator = marker(SEPARATOR)

    @classmethod
    def call_rules(cls, tokens: Mapping[str, int]) -> CallRules:
        """See ToolParser; calls are written as V3.1 does."""
        begin, end, call, call_end, separator = (marker_rule(text, tokens) for text in cls.markers)

        def tool(function: FunctionDefinition, layout: Layout | None) -> str:
            return f"{json.dumps(function.name)} {separator} {arguments_rule(function)}"

        return CallRules(f"{call} tool {call_end}", "", tool, f"{begin} {{}} {end}")

    @classmethod
    def write_calls(cls, calls: Sequence[Mapping[str, Any]]) -> str:
        """See ToolParser; calls are written as V3.1 does."""
        texts = [
            f"{CALL}{call['name']}{SEPARATOR}{json.dumps(call['arguments'], ensure_ascii=False)}{CALL_END}"
            for call in calls
        ]
        return f"{BEGIN}{''.join(texts)}{END}"

    def _named(self, header: str) -> tuple[str, str | None]:
        before, separator, after = header.partition(self._separator)
        words = after.split()
        return (words[0] if words else before.strip()) if separator else "", None
