"""How the answers to one chat are parsed: from the request, the model's formats and the prompt."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from engine.request import Grammar, ReasoningSpan, Request
from server.parsing.detect import Formats, has_place_for_tools
from server.parsing.formats.response_template import RegionParser, ResponseTemplateParser
from server.parsing.output import OutputParser, ParsedStream
from server.parsing.parser import Marker, Tools
from server.parsing.registry import RESPONSE_TEMPLATE, reasoning_parser, tool_parser
from server.parsing.tool_call_grammar import demanded_format, forced_call_grammar, json_or_calls
from server.parsing.tool_choice import callable_tools, called_tools, check_choice, offered_tools
from server.schema.chat import ChatRequest
from server.schema.refused_fields import UnsupportedField

if TYPE_CHECKING:
    from engine import RequestStream

# Enough to see a marker at the end of the prompt, with the blanks behind it.
NUM_TAIL_TOKENS = 16


class Tokenizer(Protocol):
    """What is used of the engine's TokenizerPool."""

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str: ...

    async def response_parser(
        self, prompt: list[int], tools: list[dict[str, Any]] | None
    ) -> Callable[[], RegionParser]: ...


class AnswerFormat(NamedTuple):
    """What to look for in the answers to a chat: calls of `tools`, reasoning, or both."""

    wire: ChatRequest
    formats: Formats
    tools: Tools | None

    @classmethod
    def of(cls, wire: ChatRequest, formats: Formats, chat_template: str | None) -> "AnswerFormat | None":
        """None if the answers are all content. Raises InvalidRequest, UnsupportedField."""
        check_choice(wire)
        tools = callable_tools(wire)
        if tools is not None:
            if formats.tools is None:
                raise UnsupportedField(
                    "tools cannot be called: the format in which this model calls them is not known here, "
                    "or tool_parser is none.",
                    "tools",
                )
            if formats.tools != "hermes" and not has_place_for_tools(chat_template or ""):
                raise UnsupportedField("tools have no place in this model's chat template.", "tools")
        if wire.separate_reasoning is False:
            formats = formats._replace(reasoning=None)
        if formats.reasoning == RESPONSE_TEMPLATE and wire.include_reasoning is False and wire.logprobs:
            raise UnsupportedField(
                "logprobs is not available with include_reasoning false: which tokens of this model are "
                "reasoning is not known.",
                "logprobs",
            )
        return cls(wire, formats, tools) if tools or formats.reasoning else None

    async def setup(self, prompt: list[int], tokenizer: Tokenizer, asked: Grammar | None) -> "ParserSetup":
        """What the engine needs to know, and the parsers, for answers to `prompt`.

        What is `asked` of an answer is asked of its content: calls may stand in its place. Raises
        UnsupportedField if it isn't JSON, which is told from calls.
        """
        if self.tools is not None and (asked is not None or self.tools.is_forced):
            if asked is not None and asked.kind not in ("json_object", "json_schema"):
                raise UnsupportedField(
                    f"{asked.param} cannot be used while tools may be called; send tool_choice none with it.",
                    asked.param,
                )
            return await self._constrained_setup(prompt, tokenizer, self.tools, asked)
        tool_format = self.formats.tools if self.tools else None
        if RESPONSE_TEMPLATE in (tool_format, self.formats.reasoning):
            offered = [tool.function.for_template for tool in offered_tools(self.wire)]
            make = await tokenizer.response_parser(prompt, offered or None)
            tools = self.tools or Tools({}, only=())
            return ParserSetup(
                lambda: OutputParser(
                    None, ResponseTemplateParser(tools, make), shows_reasoning=self.shows_reasoning
                ),
                shows_special_tokens=True,
            )
        return await self._native_setup(prompt, tokenizer)

    @property
    def shows_reasoning(self) -> bool:
        """Whether the client wants to see what the model thinks."""
        return self.wire.include_reasoning is not False

    async def _constrained_setup(
        self, prompt: list[int], tokenizer: Tokenizer, tools: Tools, asked: Grammar | None
    ) -> "ParserSetup":
        """The same where a grammar has the calls written, in a format that there is one of."""
        written = demanded_format(self.formats.tools or "hermes")
        formats = self.formats._replace(tools=written)
        if formats.reasoning == RESPONSE_TEMPLATE:  # it would parse the calls, too
            formats = formats._replace(reasoning=None)
        bound = self._replace(formats=formats, tools=replace(tools, is_constrained=True))
        setup = await bound._native_setup(prompt, tokenizer)
        make = forced_call_grammar if asked is None or tools.is_forced else partial(json_or_calls, asked)
        grammar = await asyncio.to_thread(  # the schemas may be megabytes
            make, called_tools(self.wire, tools), written, formats.tokens, is_one=not tools.parallel
        )
        return setup._replace(grammar=grammar)

    async def _native_setup(self, prompt: list[int], tokenizer: Tokenizer) -> "ParserSetup":
        marker = Marker(self.formats.tokens)
        markers: list[str] = []
        reasoning_class = tools_class = span = None
        is_open = False
        if self.formats.reasoning not in (None, RESPONSE_TEMPLATE):
            reasoning_class = reasoning_parser(self.formats.reasoning)
            opener, closer = reasoning_class.opener, reasoning_class.closer
            markers += (opener, closer)
            is_open = await self._is_open(prompt, tokenizer, opener, closer)
            span = reasoning_class.span(marker, is_open=is_open)
        if self.tools is not None and self.formats.tools not in (None, RESPONSE_TEMPLATE):
            tools_class = tool_parser(self.formats.tools)
            markers += tools_class.markers

        def make() -> OutputParser:
            return OutputParser(
                reasoning_class(marker, is_open=is_open) if reasoning_class else None,
                tools_class(self.tools, marker) if tools_class and self.tools else None,
                shows_reasoning=self.shows_reasoning,
            )

        tokens = self.formats.tokens
        marks = tuple((tokens[text], text) for text in markers if text in tokens)
        return ParserSetup(make, marks=marks, reasoning=span)

    async def _is_open(self, prompt: list[int], tokenizer: Tokenizer, opener: str, closer: str) -> bool:
        """Whether the prompt ends inside reasoning, begun by the template or by the turn that goes on."""
        if self.wire.continue_final_message:
            text = self.wire.messages[-1].plain_text
            return text.rfind(opener) > text.rfind(closer)
        tail = await tokenizer.decode(prompt[-NUM_TAIL_TOKENS:], skip_special_tokens=False)
        return tail.rstrip().endswith(opener)


class ParserSetup(NamedTuple):
    """A parser for each answer to one prompt, and what the engine does for it."""

    make_parser: Callable[[], OutputParser]
    marks: tuple[tuple[int, str], ...] = ()
    reasoning: ReasoningSpan | None = None
    shows_special_tokens: bool = False
    grammar: Grammar | None = None

    def configure(self, requests: Sequence[Request]) -> list[Request]:
        """The requests, with markers, reasoning and what is demanded told to the engine."""
        changes: dict[str, Any] = {"marks": self.marks, "reasoning": self.reasoning}
        if self.shows_special_tokens:
            changes = {"skip_special_tokens": False}
        if self.grammar is not None:
            changes["grammar"] = self.grammar
        return [replace(request, sampling=replace(request.sampling, **changes)) for request in requests]

    def wrap(self, stream: "RequestStream") -> ParsedStream:
        """A stream behind a parser of its own."""
        return ParsedStream(stream, self.make_parser())
