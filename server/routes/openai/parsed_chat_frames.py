"""Chunks of a chat whose answers are parsed: reasoning and tool calls beside content."""

from collections.abc import Callable

from server.answer import Answer, Delta
from server.logprobs import NO_DETAILS, TokenDetails
from server.parsing.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from server.parsing.output import ParsedDelta
from server.routes.openai.frames import ChatFrames, bare_choice
from server.schema.chat import ChatDelta
from server.schema.sampling import StreamOptions
from server.schema.tools import FunctionDelta, ToolCallDelta
from server.stream import JsonTemplate


class ParsedChatFrames(ChatFrames):
    """Makes one chunk per event of the parser: content, reasoning, new parts of a tool call."""

    def __init__(
        self, answer: Answer, options: StreamOptions | None, details: TokenDetails = NO_DETAILS
    ) -> None:
        super().__init__(answer, options, details)
        self._other_templates: dict[tuple[int, int | None], JsonTemplate] = {}

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the events for what is new; the ending has its own unless all is content."""
        assert isinstance(delta, ParsedDelta)
        if self.details:
            return self._with_details(index, delta)
        if all(isinstance(event, Content) for event in delta.events):
            return super().delta(index, delta)
        events = [self._piece(index, event) for event in delta.events]
        if delta.finish_reason is not None:
            events.append(super().delta(index, delta._replace(text="")))
        return b"".join(events)

    def _with_details(self, index: int, delta: ParsedDelta) -> bytes:
        """As `delta`, when logprobs or token ids are returned: all of them go into the first event."""
        contents = [content for event in delta.events if (content := chat_delta(event)) is not None]
        if delta.finish_reason is not None or (delta.tokens and not contents):
            contents.append(ChatDelta())
        last = len(contents) - 1
        return b"".join(
            self.event(
                [
                    self.part(
                        index,
                        content,
                        delta._replace(
                            tokens=() if number else delta.tokens,
                            finish_reason=None if number < last else delta.finish_reason,
                        ),
                    )
                ],
                with_counts=self.is_continuous,
            )
            for number, content in enumerate(contents)
        )

    def _piece(self, index: int, event: Event) -> bytes:
        """Return the chunk for one event, from a template for the kinds that repeat."""
        match event:
            case Content(text):
                return self.fill(self.templates[index], text)
            case Reasoning(text):
                return self._other(index, None, text, lambda text: ChatDelta(reasoning_content=text))
            case Arguments(number, text):
                return self._other(index, number, text, lambda text: more_arguments(number, text))
        content = chat_delta(event)
        return self.event([bare_choice(index, content)], with_counts=self.is_continuous) if content else b""

    def _other(self, index: int, number: int | None, text: str, make: Callable[[str], ChatDelta]) -> bytes:
        """Return the event for text that is not content: of call `number`, or of the reasoning (None)."""
        template = self._other_templates.get((index, number))
        if template is None:
            template = self.template(lambda text: bare_choice(index, make(text)))
            self._other_templates[index, number] = template
        return self.fill(template, text)


def chat_delta(event: Event) -> ChatDelta | None:
    """Return what an event adds to the message; None for the end of a call."""
    match event:
        case Content(text):
            return ChatDelta(content=text)
        case Reasoning(text):
            return ChatDelta(reasoning_content=text)
        case CallStart(number, call_id, name):
            function = FunctionDelta(name=name, arguments="")
            call = ToolCallDelta(index=number, id=call_id, type="function", function=function)
            return ChatDelta(tool_calls=[call])
        case Arguments(number, text):
            return more_arguments(number, text)
        case CallEnd():
            return None


def more_arguments(number: int, text: str) -> ChatDelta:
    """Return a delta with more of the arguments of call `number`."""
    return ChatDelta(tool_calls=[ToolCallDelta(index=number, function=FunctionDelta(arguments=text))])
