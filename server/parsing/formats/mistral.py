"""Mistral: [TOOL_CALLS][{"name": …, "arguments": …}, …], or [TOOL_CALLS]name[ARGS]{…} for each call.

The id of a call has nine letters or digits; its chat templates refuse others in later turns. Some models
write the id themselves, [TOOL_CALLS]name[CALL_ID]id[ARGS]{…}.
https://docs.mistral.ai/capabilities/function_calling, mistral-common's tokenizers v3 to v13
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping

from server.parsing.json_arguments import JsonArgumentsParser
from server.parsing.json_repair import JsonRepair
from server.parsing.marked_json import MarkedJsonParser
from server.parsing.parser import Marker, Tools
from server.parsing.tool_call_grammar import CallRules, Layout, arguments_rule, marker_rule
from server.schema.tools import FunctionDefinition

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
BLANKS = re.compile(r"\s*")
WORD = re.compile(r"[A-Za-z0-9_.:/-]*")
ID = re.compile(r"[A-Za-z0-9]{9}")
ID_LETTERS = string.ascii_letters + string.digits


class MistralParser(MarkedJsonParser, JsonArgumentsParser):
    """A JSON list, or names with arguments, after a marker."""

    name = "mistral"
    template_signs = (TOOL_CALLS,)
    markers = (TOOL_CALLS, CALL_ID, ARGS)
    blocks = {TOOL_CALLS: ""}  # noqa: RUF012

    def __init__(self, tools: Tools, marker: Marker) -> None:
        super().__init__(tools, marker)
        self._id_marker, self._arguments_marker = marker(CALL_ID), marker(ARGS)
        self._name = self._call_id = ""

    @classmethod
    def call_rules(cls, tokens: Mapping[str, int]) -> CallRules:
        """See ToolParser; models whose vocabulary has [ARGS] write calls by name."""
        if ARGS not in tokens:
            return super().call_rules(tokens)

        def call_by_name(function: FunctionDefinition, layout: Layout | None) -> str:
            return f"{json.dumps(function.name)} {marker_rule(ARGS, tokens)} {arguments_rule(function)}"

        return CallRules(f"{marker_rule(TOOL_CALLS, tokens)} tool", "", call_by_name)

    def _new_id(self) -> str:
        return "".join(secrets.choice(ID_LETTERS) for _ in range(9))

    def _first(self) -> bool:
        """Read JSON, or a name, after the marker."""
        if not self._take_raw(BLANKS):
            return False
        if self._text[self._at] in "[{":
            self._state = super()._first
            return True
        self._call_id = ""
        self._state = self._read_name
        return True

    def _read_name(self) -> bool:
        """Read a name, up to a marker; the arguments may also begin without one."""
        name = self._raw_word()
        if name is None:
            return False
        self._name = name
        self._state = self._after_name
        return True

    def _after_name(self) -> bool:
        return self._follow({self._id_marker: self._read_id, self._arguments_marker: self._arguments})

    def _read_id(self) -> bool:
        call_id = self._raw_word()
        if call_id is None:
            return False
        self._call_id = call_id
        self._state = self._after_id
        return True

    def _after_id(self) -> bool:
        return self._follow({self._arguments_marker: self._arguments})

    def _raw_word(self) -> str | None:
        start = self._at
        word = self._word(WORD)
        self._raw.append(self._text[start : self._at])
        return word

    def _follow(self, states: Mapping[str, Callable[[], bool]]) -> bool:
        """Continue with the state of the marker that follows, else with the arguments."""
        marker = self._accept_one(states)
        if marker is None:
            return False
        self._raw.append(marker)
        self._state = states.get(marker, self._arguments)
        return True

    def _arguments(self) -> bool:
        if not self._take_raw(BLANKS):
            return False
        call_id = self._call_id if ID.fullmatch(self._call_id) else None
        if self._text[self._at] != "{" or not self.begin(self._name, call_id):
            return self._no_call()
        self._begin_arguments(JsonRepair())
        return True

    def _close_call(self) -> None:
        if self._writer is None:
            super()._close_call()
        else:
            self._end_call(self._writer.close())
