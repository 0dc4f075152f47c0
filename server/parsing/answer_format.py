"""Chooses how the answers to one chat are parsed, from the request, the model's formats and the prompt."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from engine import RequestStream, TokenizerPool
from engine.request import Grammar, ReasoningSpan, Request
from server.parsing.detect import Formats
from server.parsing.formats import reasoning_formats, tool_formats, whole_formats
from server.parsing.formats.hermes import HermesParser
from server.parsing.formats.response_template import RESPONSE_TEMPLATE, ResponseTemplateParser
from server.parsing.output import OutputParser, ParsedStream
from server.parsing.parser import Marker, Tools
from server.parsing.tool_call_grammar import (
    CallRules,
    NoGrammar,
    forced_call_grammar,
    framed_answer,
    json_or_calls,
)
from server.parsing.tool_choice import (
    callable_tools,
    called_tools,
    check_choice,
    offered_tools,
)
from server.parsing.whole import WholeParser
from server.schema.chat import ChatRequest
from server.schema.refused_fields import UnsupportedField

# Enough to see a marker at the end of the prompt, and the whitespace after it.
NUM_TAIL_TOKENS = 16


class AnswerFormat(NamedTuple):
    """How the answers to a chat are parsed: for calls of `tools`, reasoning, or both."""

    wire: ChatRequest
    formats: Formats
    tools: Tools | None
    whole: type[WholeParser] | None = None

    @classmethod
    def of(cls, wire: ChatRequest, formats: Formats) -> "AnswerFormat | None":
        """Return None if the answers are all content. Raises InvalidRequest, UnsupportedField."""
        check_choice(wire)
        tools = callable_tools(wire)
        whole = whole_formats().get(formats.tools or "") or whole_formats().get(formats.reasoning or "")
        if whole is not None:  # it leaves nothing for a second parser
            separates = formats.reasoning is not None and wire.separate_reasoning is not False
            formats = formats._replace(tools=whole.name, reasoning=whole.name if separates else None)
            return cls(wire, formats, tools, whole)
        if wire.separate_reasoning is False:
            formats = formats._replace(reasoning=None)
        if formats.reasoning == RESPONSE_TEMPLATE and wire.include_reasoning is False and wire.logprobs:
            raise UnsupportedField(
                "logprobs is not available with include_reasoning false: which tokens of this model are "
                "reasoning is not known.",
                "logprobs",
            )
        return cls(wire, formats, tools) if tools or formats.reasoning else None

    async def setup(
        self, prompt: list[int], tokenizer: TokenizerPool, asked: Grammar | None
    ) -> "ParserSetup":
        """Return the parsers of the answers to `prompt`, and what the engine does for them.

        `asked` is the grammar of the request: calls may take the place of what it allows. Raises
        UnsupportedField if that is not JSON, which can be distinguished from calls.
        """
        if self.tools is not None and (asked is not None or self.tools.is_forced):
            if asked is not None and asked.kind not in ("json_object", "json_schema"):
                raise UnsupportedField(
                    f"{asked.param} cannot be used while tools may be called; send tool_choice none with it.",
                    asked.param,
                )
            return await self._constrained_setup(prompt, tokenizer, self.tools, asked)
        if self.whole is not None:
            return self._whole_setup(self.whole, asked)
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
        """Return True if reasoning is part of the answer."""
        return self.wire.include_reasoning is not False

    async def _constrained_setup(
        self, prompt: list[int], tokenizer: TokenizerPool, tools: Tools, asked: Grammar | None
    ) -> "ParserSetup":
        """See setup(); a grammar makes the model write calls in a format that has rules for them."""
        own = None if self.whole and self.wire.continue_final_message else self.formats.tools
        make = forced_call_grammar if asked is None or tools.is_forced else partial(json_or_calls, asked)

        def with_format() -> tuple[str, CallRules, Grammar]:
            called = called_tools(self.wire, tools)
            for name in (own, None):
                tool_format, rules = grammar_format(name, self.formats.tokens)
                with suppress(NoGrammar):
                    return tool_format, rules, make(rules, called, is_one=not tools.parallel)
            raise AssertionError("Hermes' format has a grammar for every schema")

        # The schemas may be megabytes.
        tool_format, rules, grammar = await asyncio.to_thread(with_format)
        formats = self.formats._replace(tools=tool_format)
        if formats.reasoning == RESPONSE_TEMPLATE:  # it would parse the calls, too
            formats = formats._replace(reasoning=None)
        constrained = self._replace(formats=formats, tools=replace(tools, is_constrained=True))
        if self.whole is not None and rules.frame:
            setup = constrained._whole_setup(self.whole, None)
        else:
            setup = await constrained._native_setup(prompt, tokenizer)
        return setup._replace(grammar=grammar)

    def _whole_setup(self, whole: type[WholeParser], asked: Grammar | None) -> "ParserSetup":
        """See setup(); one parser reads all of an answer, also if no calls are parsed."""
        tokens = self.formats.tokens
        marker = Marker(tokens)
        is_continued = bool(self.wire.continue_final_message)
        tools = self.tools or Tools({}, only=())

        def make() -> OutputParser:
            parser = whole(
                tools,
                marker,
                separates_reasoning=self.formats.reasoning is not None,
                is_continued=is_continued,
            )
            return OutputParser(None, parser, shows_reasoning=self.shows_reasoning)

        rules = whole.call_rules(tokens)
        if asked is not None and rules is not None and rules.frame and not is_continued:
            asked = framed_answer(asked, rules)
        return ParserSetup(
            make, marks=marks_of(whole.markers, tokens), reasoning=whole.span(marker), grammar=asked
        )

    async def _native_setup(self, prompt: list[int], tokenizer: TokenizerPool) -> "ParserSetup":
        """See setup(); the formats have parsers here."""
        marker = Marker(self.formats.tokens)
        markers: list[str] = []
        reasoning_class = reasoning_formats().get(self.formats.reasoning or "")
        tools_class = tool_formats().get(self.formats.tools or "") if self.tools else None
        span = None
        is_open = False
        if reasoning_class is not None:
            markers += reasoning_class.markers
            markers += chain(*reasoning_class.answer_markers.items())
            is_open = await self._is_open(prompt, tokenizer, *reasoning_class.ends(Marker()))
            span = reasoning_class.span(marker, is_open=is_open)
        if tools_class is not None:
            markers += tools_class.markers

        def make() -> OutputParser:
            return OutputParser(
                reasoning_class(marker, is_open=is_open) if reasoning_class else None,
                tools_class(self.tools, marker) if tools_class and self.tools else None,
                shows_reasoning=self.shows_reasoning,
            )

        return ParserSetup(make, marks=marks_of(markers, self.formats.tokens), reasoning=span)

    async def _is_open(self, prompt: list[int], tokenizer: TokenizerPool, opener: str, closer: str) -> bool:
        """Return True if the prompt ends inside reasoning that the template or a continued turn began."""
        if self.wire.continue_final_message:
            text = self.wire.messages[-1].plain_text
            return text.rfind(opener) > text.rfind(closer)
        tail = await tokenizer.decode(prompt[-NUM_TAIL_TOKENS:], skip_special_tokens=False)
        return tail.rstrip().endswith(opener)


class ParserSetup(NamedTuple):
    """Makes a parser for each answer to one prompt; the rest are sampling parameters it depends on."""

    make_parser: Callable[[], OutputParser]
    marks: tuple[tuple[int, str], ...] = ()
    reasoning: ReasoningSpan | None = None
    shows_special_tokens: bool = False
    grammar: Grammar | None = None

    def configure(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests with markers, reasoning and the grammar in their sampling parameters."""
        changes: dict[str, Any] = {"marks": self.marks, "reasoning": self.reasoning}
        if self.shows_special_tokens:
            changes = {"skip_special_tokens": False}
        if self.grammar is not None:
            changes["grammar"] = self.grammar
        return [replace(request, sampling=replace(request.sampling, **changes)) for request in requests]

    def wrap(self, stream: RequestStream) -> ParsedStream:
        """Return a stream of parsed deltas, with a parser of its own."""
        return ParsedStream(stream, self.make_parser())


def marks_of(markers: Iterable[str], tokens: Mapping[str, int]) -> tuple[tuple[int, str], ...]:
    """Return those markers that are control tokens, with their ids."""
    return tuple((tokens[text], text) for text in markers if text in tokens)


def grammar_format(own: str | None, tokens: Mapping[str, int]) -> tuple[str, CallRules]:
    """Return the format in which a grammar writes calls, and its rules: `own` if it has any, else Hermes."""
    parser = tool_formats().get(own or "", HermesParser)
    rules = parser.call_rules(tokens)
    if rules is None:
        parser, rules = HermesParser, HermesParser.call_rules(tokens)
    return parser.name, rules
