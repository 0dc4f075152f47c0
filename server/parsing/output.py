"""Combines the parsers of one answer, and applies them to the engine's stream."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from engine.control_tokens import strip
from engine.outputs import FinishReason, OutputToken, TextDelta
from engine.stats import RequestTimes
from server.parsing.events import Content, Event, Reasoning, join
from server.parsing.parser import ToolParser
from server.parsing.reasoning import ReasoningParser

if TYPE_CHECKING:
    from engine import RequestStream

# Prose is parsed at 4 million characters a second, JSON that is all brackets at 0.5 million: 1 to 8 ms.
MAX_CHARS_ON_LOOP = 4096


class OutputParser:
    """Parses reasoning, then content and calls. `shows_reasoning` False drops the reasoning."""

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, shows_reasoning: bool = True
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self.shows_reasoning = shows_reasoning

    @property
    def num_calls(self) -> int:
        """Return the number of complete calls."""
        return self._tools.num_calls if self._tools else 0

    @property
    def is_call_open(self) -> bool:
        """Return True if a call has begun and not ended."""
        return self._tools is not None and self._tools.is_call_open

    @property
    def is_named(self) -> bool:
        """Return True if the request names the tool to call."""
        return self._tools is not None and self._tools.tools.is_named

    @property
    def may_be_full(self) -> bool:
        """Return True if a call may end the answer before the model does."""
        return self._tools is not None

    @property
    def is_full(self) -> bool:
        """Return True if no more calls may follow; all further text is dropped."""
        return self._tools is not None and self._tools.is_full

    def feed(self, text: str) -> list[Event]:
        """Parse more text; return the events it makes certain."""
        return self._pass(self._reasoning.feed(text) if self._reasoning else [Content(text)])

    def finish(self, *, is_cut: bool) -> list[Event]:
        """End the text; with `is_cut` it broke off, and an open call stays incomplete."""
        events = self._pass(self._reasoning.finish(is_cut=is_cut) if self._reasoning else [])
        if self._tools:
            events += self._shown(self._tools.finish(is_cut=is_cut))
        return events

    def _pass(self, events: list[Event]) -> list[Event]:
        """Pass content on to the parser of calls."""
        passed: list[Event] = []
        for event in events:
            if not isinstance(event, Content):
                passed.append(event)
            elif self._tools:
                passed += self._tools.feed(event.text)
            elif text := strip(event.text):
                passed.append(Content(text))
        return self._shown(passed)

    def _shown(self, events: Iterable[Event]) -> list[Event]:
        return [event for event in events if self.shows_reasoning or not isinstance(event, Reasoning)]


class ParsedDelta(NamedTuple):
    """A TextDelta whose text has been parsed into `events`; `text` is the content among them.

    The last delta of an answer `has_calls` if the answer has complete calls and none that broke off.
    `is_named`: the request named the tool to call.
    """

    text: str
    num_tokens: int
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    events: list[Event]
    has_calls: bool = False
    is_named: bool = False
    tokens: tuple[OutputToken, ...] = ()
    prompt_tokens: tuple[OutputToken, ...] = ()

    @property
    def lists_tokens(self) -> bool:
        """See TextDelta; tokens are not held back when a parser holds their text back."""
        return any(token.is_listed for token in self.tokens)


class ParsedStream:
    """A RequestStream whose deltas are parsed."""

    def __init__(self, stream: "RequestStream", parser: OutputParser) -> None:
        self._stream = stream
        self._parser = parser
        self._is_over = False
        self._num_tokens = 0

    @property
    def num_prompt_tokens(self) -> int:
        """See RequestStream, as for all counts."""
        return self._stream.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        return self._stream.num_cached_tokens

    @property
    def num_output_tokens(self) -> int:
        return self._stream.num_output_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        return self._stream.num_reasoning_tokens

    @property
    def ttft_seconds(self) -> float | None:
        return self._stream.ttft_seconds

    @property
    def decode_seconds(self) -> float:
        return self._stream.decode_seconds

    def abort(self) -> None:
        """Stop computing. Does nothing after the end."""
        self._stream.abort()

    def when_ended(self, take: Callable[[RequestTimes], None]) -> None:
        """See RequestStream."""
        self._stream.when_ended(take)

    def __aiter__(self) -> AsyncIterator[ParsedDelta]:
        return self

    async def __anext__(self) -> ParsedDelta:
        """Wait for new text and parse it; a full answer ends, and its computation is aborted."""
        if self._is_over:
            raise StopAsyncIteration
        parsed = await self._parsed(await anext(self._stream))
        self._is_over = parsed.finish_reason is not None
        if self._is_over:
            self._stream.abort()
        return parsed

    async def _parsed(self, delta: TextDelta) -> ParsedDelta:
        if len(delta.text) > MAX_CHARS_ON_LOOP:
            return await asyncio.to_thread(self._parse, delta)
        return self._parse(delta)

    def _parse(self, delta: TextDelta) -> ParsedDelta:
        events = self._parser.feed(delta.text)
        finish_reason, stop_reason = delta.finish_reason, delta.stop_reason
        if self._parser.is_full:
            finish_reason, stop_reason = FinishReason.STOP, None
        if finish_reason is not None:
            is_cut = finish_reason is FinishReason.LENGTH or isinstance(stop_reason, str)
            events = join([*events, *self._parser.finish(is_cut=is_cut)])
        return ParsedDelta(
            content_of(events),
            delta.num_tokens,
            finish_reason,
            stop_reason,
            events,
            has_calls=finish_reason is FinishReason.STOP
            and self._parser.num_calls > 0
            and not self._parser.is_call_open,
            is_named=self._parser.is_named,
            tokens=self._tokens(delta.tokens),
            prompt_tokens=delta.prompt_tokens,
        )

    def _tokens(self, tokens: tuple[OutputToken, ...]) -> tuple[OutputToken, ...]:
        """Return the tokens; those of hidden reasoning are marked as not shown."""
        if not tokens or self._parser.shows_reasoning:
            return tokens
        num_hidden = self._stream.num_reasoning_tokens - self._num_tokens
        self._num_tokens += len(tokens)
        return tuple(
            token._replace(is_shown=False, is_hidden=False) if number < num_hidden else token
            for number, token in enumerate(tokens)
        )

    async def collect(self) -> ParsedDelta:
        """Wait for the end and return the answer as one delta; abort if the task is cancelled."""
        if not self._parser.may_be_full:
            return await self._parsed(await self._stream.collect())
        events: list[Event] = []
        tokens: list[OutputToken] = []
        prompt_tokens: tuple[OutputToken, ...] = ()
        num_tokens = 0
        try:
            async for parsed in self:
                events += parsed.events
                tokens += parsed.tokens
                prompt_tokens = prompt_tokens or parsed.prompt_tokens
                num_tokens += parsed.num_tokens
        finally:
            self.abort()
        return parsed._replace(
            text=content_of(events),
            num_tokens=num_tokens,
            events=join(events),
            tokens=tuple(tokens),
            prompt_tokens=prompt_tokens,
        )


def content_of(events: Iterable[Event]) -> str:
    """Return the content among `events`."""
    return "".join(event.text for event in events if isinstance(event, Content))
