"""Functionary 3.1: <function=f>{…}</function>. Llama 3.1 may write its users' functions like this, too.

https://huggingface.co/meetkai/functionary-medium-v3.1
"""

import json
from collections.abc import Mapping

from server.parsing.named_call import NamedCallParser
from server.parsing.tool_call_grammar import CallRules, Layout, arguments_rule
from server.schema.tools import FunctionDefinition

OPEN, CLOSE = "<function=", "</function>"


class FunctionaryParser(NamedCallParser):
    """The name is in the tag before the arguments."""

    name = "functionary_v31"
    template_signs = (OPEN,)
    markers = (OPEN, CLOSE)
    call = (OPEN, CLOSE)

    @classmethod
    def call_rules(cls, tokens: Mapping[str, int]) -> CallRules:
        """See ToolParser."""

        def tool(function: FunctionDefinition, layout: Layout | None) -> str:
            head = json.dumps(f"{OPEN}{function.name}>")
            return f"{head} {arguments_rule(function)} {json.dumps(CLOSE)}"

        return CallRules("tool", "", tool)

    def _named(self, header: str) -> tuple[str, str | None]:
        name, end, rest = header.partition(">")
        return (name if end and not rest.strip() else ""), None
