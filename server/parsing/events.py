"""Events that parsers emit, and the message they add up to."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple


class Content(NamedTuple):
    """Text of the answer."""

    text: str


class Reasoning(NamedTuple):
    """Text of the reasoning before the answer."""

    text: str


class CallStart(NamedTuple):
    """A tool call begins; calls are numbered from 0 without gaps. Its arguments follow."""

    number: int
    id: str
    name: str


class Arguments(NamedTuple):
    """Text of a call's arguments. Joined, it is one JSON object, unless the answer broke off in it."""

    number: int
    text: str


class CallEnd(NamedTuple):
    """A call is complete."""

    number: int


Event = Content | Reasoning | CallStart | Arguments | CallEnd


@dataclass(slots=True)
class Call:
    """A tool call of an answer; `arguments` is JSON in a string."""

    id: str
    name: str
    arguments: str = ""
    is_complete: bool = False


@dataclass(slots=True)
class Message:
    """An answer as far as it has come."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Message":
        """Return the message that `events` add up to."""
        contents: list[str] = []
        reasonings: list[str] = []
        fragments: list[list[str]] = []
        message = cls()
        for event in events:
            match event:
                case Content(text):
                    contents.append(text)
                case Reasoning(text):
                    reasonings.append(text)
                case CallStart(_, call_id, name):
                    message.calls.append(Call(call_id, name))
                    fragments.append([])
                case Arguments(number, text):
                    fragments[number].append(text)
                case CallEnd(number):
                    message.calls[number].is_complete = True
        message.content = "".join(contents)
        message.reasoning = "".join(reasonings)
        for call, parts in zip(message.calls, fragments, strict=True):
            call.arguments = "".join(parts)
        return message


def join(events: Iterable[Event]) -> list[Event]:
    """Return `events` with successive texts of one kind, or of one call, joined."""
    joined: list[Event] = []
    for (kind, number), group in groupby(
        events, key=lambda event: (type(event), getattr(event, "number", 0))
    ):
        run = list(group)
        if kind is Content:
            joined.append(Content("".join(event.text for event in run if isinstance(event, Content))))
        elif kind is Reasoning:
            joined.append(Reasoning("".join(event.text for event in run if isinstance(event, Reasoning))))
        elif kind is Arguments:
            joined.append(
                Arguments(number, "".join(event.text for event in run if isinstance(event, Arguments)))
            )
        else:
            joined += run
    return joined
