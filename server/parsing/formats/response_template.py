"""The tokenizer's own response template, parsed by transformers, for calls and reasoning.

A template (`response_template` in tokenizer_config.json) describes how the model writes each field of a
message. A call is known only when its region closes, so its arguments come in one event.
https://huggingface.co/docs/transformers/main/chat_response_parsing
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from server.parsing.events import Reasoning
from server.parsing.json_call import object_text
from server.parsing.parser import Marker, ToolParser, Tools

RESPONSE_TEMPLATE = "response_template"
REASONING = frozenset(("reasoning_content", "reasoning", "thinking"))
CALLS = "tool_calls"


class RegionParser(Protocol):
    """transformers' ResponseParser. It may raise any exception on a malformed region."""

    initial_events: list[dict[str, Any]]

    def feed(self, text: str) -> list[dict[str, Any]]: ...

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]: ...


class ResponseTemplateParser(ToolParser):
    """Content, reasoning and calls, by the regions of a template; `make` returns a parser of one answer.

    A malformed region is content, and so is all that follows it. This format is chosen by the tokenizer, not
    by signs of a chat template, and is therefore not registered.
    """

    name = RESPONSE_TEMPLATE
    template_signs = ()
    markers = ()

    def __init__(self, tools: Tools, make: Callable[[], RegionParser]) -> None:
        super().__init__(tools, Marker())
        self._make = make
        self._regions = make()
        self._seen: list[str] = []
        self._field = ""
        self._body: list[str] = []  # of a call
        self._reasoning_blanks: list[str] = []
        self._has_reasoned = self._has_said = False
        self._use(self._regions.initial_events)
        self._events.clear()  # the prompt is no part of the answer
        self._state = self._region

    @classmethod
    def call_rules(cls, tokens: Mapping[str, int]) -> None:
        """See ToolParser; transformers has no grammar of a template."""

    def _region(self) -> bool:
        text = self._rest()
        try:
            events = self._regions.feed(text)
        except Exception:  # patterns and conversions of a template, on whatever the model wrote
            self._read_until_fault(text)
        else:
            self._seen.append(text)
            self._use(events)
        return True

    def _read_until_fault(self, text: str) -> None:
        """Read `text` by the character up to its fault: a failed feed() loses what came before it."""
        regions = self._make()
        regions.feed("".join(self._seen))
        for at, char in enumerate(text):
            try:
                self._use(regions.feed(char))
            except Exception:  # as above
                self._give_up(text[at + 1 :])
                return

    def _give_up(self, rest: str) -> None:
        self._say("".join(self._body))
        self._state = self._content
        self._text, self._at = rest, 0

    def _end(self, *, is_cut: bool) -> None:
        if self._state == self._region and not self.is_full:
            try:
                self._use(self._regions.finalize()[1])
            except Exception:  # as above
                self._give_up("")
        super()._end(is_cut=is_cut)

    def _use(self, events: Iterable[Mapping[str, Any]]) -> None:
        for event in events:
            match event["type"]:
                case "region_open":
                    self._field = event["field"]
                    self._body.clear()
                    self._reasoning_blanks.clear()
                case "region_chunk":
                    self._chunk(event["text"])
                case "region_close":
                    if self._field == CALLS and not self.is_full and not self._call(event["value"]):
                        self._say("".join(self._body))
                    self._body.clear()
                    self._field = ""

    def _chunk(self, text: str) -> None:
        if self._field == CALLS:
            self._body.append(text)
        elif self._field in REASONING:
            said = text.rstrip()
            if said:
                whole = "".join(self._reasoning_blanks) + said
                self._events.append(Reasoning(whole if self._has_reasoned else whole.lstrip()))
                self._reasoning_blanks.clear()
                self._has_reasoned = True
            self._reasoning_blanks.append(text[len(said) :])
        elif self._has_said or not self._has_reasoned:
            self._say(text)
        elif text := text.lstrip():
            self._has_said = True
            self._say(text)

    def _call(self, value: Any) -> bool:
        """Read one call, or a list of them; return False for any other value."""
        calls = [function_of(call) for call in (value if isinstance(value, list) else [value])]
        for name, arguments in calls:
            if self.is_full:
                break
            if not arguments or not self.begin(name):
                return False
            self.arguments(arguments)
            self.end()
        return bool(calls)

    def _close_call(self) -> None:
        """Do nothing: calls are never left open."""


def function_of(call: Any) -> tuple[str, str]:
    """Return the name and the arguments of a parsed call; without arguments it is no call."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return "", ""
    arguments = function.get("arguments")
    try:
        text = json.dumps({} if arguments is None else arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError):  # no JSON, or half a surrogate pair
        return "", ""
    return function["name"], text if isinstance(arguments, dict | None) else object_text(text)
