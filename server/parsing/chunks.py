"""The chunks of a chat whose answers are parsed: reasoning and calls beside content."""

from collections.abc import Callable

from server.answer import Answer, Delta
from server.logprobs import NO_DETAILS, TokenDetails
from server.parsing.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from server.parsing.output import ParsedDelta
from server.schema.chat import ChatDelta
from server.schema.sampling import StreamOptions
from server.schema.tools import FunctionDelta, ToolCallDelta
from server.stream import ChatFrames, bare_choice


class ParsedChatFrames(ChatFrames):
    """Content as in any chat; a chunk each for reasoning and for what is new of a call."""

    def __init__(
        self, answer: Answer, options: StreamOptions | None, details: TokenDetails = NO_DETAILS
    ) -> None:
        super().__init__(answer, options, details)
        self._other_parts: dict[tuple[int, int | None], tuple[bytes, bytes]] = {}

    def delta(self, index: int, delta: Delta) -> bytes:
        """The events for what is new; an ending that has more to say than content is one of its own."""
        assert isinstance(delta, ParsedDelta)
        if self.details:
            return self._told(index, delta)
        if all(isinstance(event, Content) for event in delta.events):
            return super().delta(index, delta)
        events = [self._piece(index, event) for event in delta.events]
        if delta.finish_reason is not None:
            events.append(super().delta(index, delta._replace(text="")))
        return b"".join(events)

    def _told(self, index: int, delta: ParsedDelta) -> bytes:
        """The same where tokens are told: the first event tells all of them, text or none."""
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
        """One event as prepared bytes around its text, where it is one that comes again and again."""
        match event:
            case Content(text):
                return self.fill(self.parts[index], text)
            case Reasoning(text):
                return self._other(index, None, text, lambda text: ChatDelta(reasoning_content=text))
            case Arguments(number, text):
                return self._other(index, number, text, lambda text: more_arguments(number, text))
        content = chat_delta(event)
        return self.event([bare_choice(index, content)], with_counts=self.is_continuous) if content else b""

    def _other(self, index: int, number: int | None, text: str, make: Callable[[str], ChatDelta]) -> bytes:
        """The event for text that is no content: of call `number`, else of the reasoning."""
        parts = self._other_parts.get((index, number))
        if parts is None:
            parts = self.cut(lambda mark: bare_choice(index, make(mark)))
            self._other_parts[index, number] = parts
        return self.fill(parts, text)


def chat_delta(event: Event) -> ChatDelta | None:
    """What an event adds to the message; nothing where a call ends."""
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
    """More of the arguments of call `number`."""
    return ChatDelta(tool_calls=[ToolCallDelta(index=number, function=FunctionDelta(arguments=text))])
