"""Harmony, of gpt-oss: messages with a channel, and with a recipient where they are calls.

    <|channel|>analysis<|message|>I look it up.<|end|><|start|>assistant
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>

(in one line). Analysis is reasoning; the texts of other channels are content. A call's recipient comes before
or after the channel, and a call ends the turn. https://github.com/openai/harmony
"""

import json
import re
from collections.abc import Callable, Mapping

from engine.request import ReasoningSpan
from server.parsing.json_arguments import JsonArgumentsParser
from server.parsing.json_repair import JsonRepair
from server.parsing.parser import Marker, Tools
from server.parsing.tool_call_grammar import CallRules, Layout, arguments_rule, marker_rule
from server.parsing.whole import WholeParser
from server.schema.tools import FunctionDefinition

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
FUNCTIONS = "functions."
ROLE = "assistant"
# What a message may begin with where <|start|> is in the prompt, or missing.
LEADS = ("to=", ROLE)
RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
# Far more than a recipient of 128 characters needs: a longer header is content.
MAX_HEADER_CHARS = 512


class HarmonyParser(WholeParser, JsonArgumentsParser):
    """Messages. Where one of several ends is missing, the next header ends it."""

    name = "harmony"
    template_signs = (CHANNEL + ANALYSIS,)
    markers = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

    def __init__(
        self, tools: Tools, marker: Marker, *, separates_reasoning: bool = True, is_continued: bool = False
    ) -> None:
        super().__init__(tools, marker, separates_reasoning=separates_reasoning, is_continued=is_continued)
        self._texts = {marker(text): text for text in self.markers}  # names of the markers as they come
        self._header: dict[str, list[str]] = {}  # texts by the marker they follow
        self._part = START
        self._num_header_chars = 0
        self._name = ""
        self._state = self._body if is_continued else self._lead

    @classmethod
    def call_rules(cls, tokens: Mapping[str, int]) -> CallRules | None:
        """See ToolParser; the grammar describes the reasoning before the answer, too."""
        if not {START, CHANNEL, MESSAGE, END} <= tokens.keys():
            return None
        start, channel, constrain, message, end = (
            marker_rule(text, tokens) for text in (START, CHANNEL, CONSTRAIN, MESSAGE, END)
        )

        def tool(function: FunctionDefinition, layout: Layout | None) -> str:
            name = json.dumps(f"{function.name} ")
            return f'{name} {constrain} "json" {message} {arguments_rule(function)}'

        frame = (
            "start: thought* ({})\n"
            f'thought: {channel} "{ANALYSIS}" {message} TEXT {end} {start} "{ROLE}"\n'
            "TEXT: /(?s:.*)/"
        )
        call = f'{channel} "{COMMENTARY} to={FUNCTIONS}" tool'
        answer = f'{channel} "{FINAL}" {message} answer'
        return CallRules(call, None, tool, frame=frame, answer=answer)

    @classmethod
    def span(cls, marker: Marker) -> ReasoningSpan:
        """See WholeParser."""
        return ReasoningSpan(marker(CHANNEL) + ANALYSIS + marker(MESSAGE), marker(END))

    def _openers(self) -> Mapping[str, Callable[[], bool]]:
        return dict.fromkeys(self.markers, self._body)

    def _lead(self) -> bool:
        """Expect a message. Text without a header, which the model should not write, is content."""
        if not self._skip_blanks():
            return False
        lead = self._accept_one((*LEADS, *self._content_markers))
        if lead is None:
            return False
        self._at -= len(lead)
        if lead:
            self._begin_header()
        else:
            self._begin_text(is_reasoning=False)
            self._state = self._body
        return True

    def _begin_header(self) -> None:
        self._header = {}
        self._part = START
        self._num_header_chars = 0
        self._raw = []
        self._state = self._in_header

    def _in_header(self) -> bool:
        """Read a header up to <|message|>."""
        found = self._opener.search(self._text, self._at)
        end = found.start() if found else len(self._text) - self._num_held(self._content_markers)
        text = self._text[self._at : end]
        self._at = end
        self._header.setdefault(self._part, []).append(text)
        self._raw.append(text)
        self._num_header_chars += len(text)
        if self._num_header_chars > MAX_HEADER_CHARS:
            return self._begin_content("".join(self._raw))
        if found is None:
            return False
        self._at = found.end()
        self._num_header_chars += len(found[0])
        marker = self._texts[found[0]]
        if marker == START:
            self._begin_header()
        elif marker == MESSAGE:
            self._end_header()
        elif marker in (CHANNEL, CONSTRAIN):
            self._part = marker
            self._raw.append(found[0])
        else:
            self._state = self._lead
        return True

    def _end_header(self) -> None:
        """Choose by the header how the message is read; one of another role ends the answer."""
        parts = {part: "".join(texts).strip() for part, texts in self._header.items()}
        role = parts.get(START, "")
        if role and not role.startswith(LEADS):
            self.is_full = True
            return
        found = RECIPIENT.search(parts.get(CHANNEL, "")) or RECIPIENT.search(role)
        self._name = found[1].removeprefix(FUNCTIONS) if found else ""
        channel = parts.get(CHANNEL, "").split(maxsplit=1)
        self._begin_text(is_reasoning=channel[:1] == [ANALYSIS])
        self._raw = []
        self._state = self._body
        is_call = found is not None and (
            found[1].startswith(FUNCTIONS) or self._name in self.tools.parameters
        )
        if is_call:
            self._state = self._arguments

    def _begin_content(self, text: str) -> bool:
        self._begin_text(is_reasoning=False)
        self._add_text(text)
        self._raw = []
        self._state = self._body
        return True

    def _body(self) -> bool:
        """Emit the text of a message up to a marker."""
        found = self._opener.search(self._text, self._at)
        end = found.start() if found else len(self._text) - self._num_held(self._content_markers)
        self._add_text(self._text[self._at : end])
        self._at = end
        return found is not None and self._next(found)

    def _next(self, found: re.Match[str]) -> bool:
        """Consume the marker after a body; a stray one inside it is dropped."""
        marker = self._texts[found[0]]
        if marker in (START, CHANNEL):
            self._begin_header()
            return True
        self._at = found.end()
        if marker in (END, CALL, RETURN):
            self._state = self._lead
        return True

    def _arguments(self) -> bool:
        """Begin a call at its first brace, or at the end of an empty body; any other body is text."""
        if not self._skip_blanks():
            return False
        ends = self._accept_one(self._content_markers)
        if ends is None:
            return False
        self._at -= len(ends)
        is_call = (ends or self._text[self._at] == "{") and self.begin(self._name)
        if not is_call:
            self._state = self._body
        elif ends:
            self._end_call("{}")
        else:
            self._begin_arguments(JsonRepair())
        return True

    def _after_call(self) -> bool:
        """Drop what follows the arguments, up to a marker."""
        found = self._opener.search(self._text, self._at)
        self._at = found.start() if found else len(self._text) - self._num_held(self._content_markers)
        return found is not None and self._next(found)

    def _end(self, *, is_cut: bool) -> None:
        """See Parser; what is left of a header, or of a call that has not begun, is dropped."""
        if self._state in (self._in_header, self._arguments, self._after_call):
            self._rest()
            self._raw = []
        if self._state == self._arguments and not is_cut and self.begin(self._name):
            self._end_call("{}")
        super()._end(is_cut=is_cut)
