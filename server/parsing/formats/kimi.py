"""Kimi K2: <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>, in a section.

The chat template shows the id of an earlier call as the name of its function, so ids are functions.f:0.
https://huggingface.co/moonshotai/Kimi-K2-Instruct
"""

import json
import re
from collections.abc import Mapping

from server.parsing.named_call import NamedCallParser
from server.parsing.parser import Marker, Tools
from server.parsing.tool_call_grammar import CallRules, Layout, arguments_rule, marker_rule
from server.schema.tools import FunctionDefinition

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
HEADER = re.compile(r"\s*((?:functions\.)?(\S+?)(?::\d+)?)\s*")


class KimiParser(NamedCallParser):
    """The name is part of the call's id."""

    name = "kimi_k2"
    template_signs = (CALL,)
    markers = (BEGIN, END, CALL, CALL_END, ARGUMENTS)
    section = (BEGIN, END)
    call = (CALL, CALL_END)

    def __init__(self, tools: Tools, marker: Marker) -> None:
        super().__init__(tools, marker)
        self._arguments_marker = marker(ARGUMENTS)

    @classmethod
    def call_rules(cls, tokens: Mapping[str, int]) -> CallRules:
        """See ToolParser."""
        begin, end, call, call_end, separator = (marker_rule(text, tokens) for text in cls.markers)

        def tool(function: FunctionDefinition, layout: Layout | None) -> str:
            return (
                f"{json.dumps(f'functions.{function.name}:')} NUMBER {separator} {arguments_rule(function)}"
            )

        return CallRules(f"{call} tool {call_end}\nNUMBER: /[0-9]/", "", tool, f"{begin} {{}} {end}")

    def _named(self, header: str) -> tuple[str, str | None]:
        found = HEADER.fullmatch(header.removesuffix(self._arguments_marker))
        name = found[2] if found else ""
        return name, f"functions.{name}:{self.num_calls}"
