"""A format that exists only in tests: call!{"name": …, "arguments": …}."""

from collections.abc import Callable, Mapping

from server.parsing.json_call import JsonToolParser
from server.parsing.tool_call_grammar import CallRules, json_call_rule, marker_rule

MARKER = "call!"


class ToyParser(JsonToolParser):
    """JSON after a marker."""

    name = "toy"
    template_signs = markers = (MARKER,)

    @classmethod
    def call_rules(cls, tokens: Mapping[str, int]) -> CallRules:
        """See ToolParser."""
        return CallRules(
            f"{marker_rule(MARKER, tokens)} tool", "", lambda function, layout: json_call_rule(function)
        )

    def _openers(self) -> Mapping[str, Callable[[], bool]]:
        return {MARKER: self._next_call}

    def _between(self) -> bool:
        self._state = self._content
        return True
