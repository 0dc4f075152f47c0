"""Deltas -> the numbered events of the Responses API."""

from itertools import count
from typing import TypedDict

from engine.outputs import OutputToken
from server.answer import MAX_TOKENS_ON_LOOP, Answer, Delta
from server.errors import message_of
from server.logprobs import TokenDetails
from server.parsing.content_blocks import Block, BlockDelta, BlockEnd, BlockEvent, BlockStart, ContentBlocks
from server.routes.responses.items import (
    empty_block,
    ended,
    item_id,
    item_of,
    logprobs_of,
    status_of,
    text_of,
)
from server.schema.response_events import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    ItemEvent,
    PartEvent,
    PartKind,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    StateEvent,
    StateKind,
    TextDeltaEvent,
    TextDoneEvent,
)
from server.schema.responses import ReasoningText, ResponseError, ResponseObject
from server.stream import Frames, JsonTemplate, named_event


class ItemPlace(TypedDict):
    """The place of an item in the output."""

    item_id: str
    output_index: int


class Place(ItemPlace):
    """The place of the text of an item's one part."""

    content_index: int


class ResponseFrames(Frames):
    """The states of a response around its items, each of which begins, grows and ends.

    `is_call`: see whole().
    """

    def __init__(
        self, answer: Answer, response: ResponseObject, details: TokenDetails, *, is_call: bool = False
    ) -> None:
        super().__init__(answer)
        self._response = response
        self._is_call = is_call
        self._details = details
        self._numbers = count()
        self._blocks = ContentBlocks()
        self._more: JsonTemplate | None = None  # the events of the open block's text
        self._last: Delta | None = None

    def opening(self) -> bytes:
        """The response without output. What of the prompt was cached is known later."""
        return self._state("response.created", self._response) + self._state(
            "response.in_progress", self._response
        )

    def takes_long(self, delta: Delta | None) -> bool:
        """As in `Frames`; the last events carry all tokens once more."""
        if super().takes_long(delta):
            return True
        is_end = delta is None or delta.finish_reason is not None
        return is_end and sum(len(block.tokens) for block in self._blocks.all) > MAX_TOKENS_ON_LOOP

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the events for what begins, grows and ends."""
        if delta.finish_reason is not None:
            self._last = delta
        return b"".join(map(self._step, self._blocks.add(delta)))

    def ending(self) -> bytes:
        """Return the whole response. An answer without text still has its message, unless it is a call."""
        assert self._last is not None
        empty = b""
        if not self._blocks.all and not self._is_call:
            block = empty_block(self._last)
            self._blocks.all.append(block)
            empty = self._begin(block) + self._end(block)
        response = ended(self._response, self.answer, self._last, self._blocks.all, self._details)
        kind: StateKind = "response.completed" if response.status == "completed" else "response.incomplete"
        return empty + self._state(kind, response)

    def failure(self, error: Exception) -> bytes:
        """The response in the state failed, with the reason."""
        reason = ResponseError(message=message_of(error))
        return self._state(
            "response.failed", self._response.model_copy(update={"status": "failed", "error": reason})
        )

    def _step(self, step: BlockEvent) -> bytes:
        match step:
            case BlockStart(block):
                return self._begin(block)
            case BlockDelta(block, text, tokens):
                assert self._more is not None
                if tokens and self._details:
                    return self._with_logprobs(block, text, tokens)
                return self._more.fill_numbered(next(self._numbers), text)
            case BlockEnd(block):
                return self._end(block)

    def _with_logprobs(self, block: Block, text: str, tokens: tuple[OutputToken, ...]) -> bytes:
        """More text, with its tokens."""
        return named_event(
            TextDeltaEvent(
                sequence_number=next(self._numbers),
                delta=text,
                logprobs=logprobs_of(tokens, self._details),
                **part_of(self._at(block)),
            )
        )

    def _begin(self, block: Block) -> bytes:
        self._more = JsonTemplate(lambda number, text: more(number, text, block, self._at(block)))
        item = item_of(self.answer, block, "in_progress", self._details)
        added = ItemEvent(
            type="response.output_item.added",
            sequence_number=next(self._numbers),
            output_index=block.number,
            item=item,
        )
        part = b"" if block.kind == "call" else self._part("response.content_part.added", block)
        return named_event(added) + part

    def _end(self, block: Block) -> bytes:
        text, number, at = block.text, next(self._numbers), self._at(block)
        if block.kind == "call":
            arguments = ArgumentsDoneEvent(sequence_number=number, name=block.name, arguments=text, **at)
            done = named_event(arguments)
        elif block.kind == "reasoning":
            done = named_event(ReasoningDoneEvent(sequence_number=number, text=text, **part_of(at)))
            done += self._part("response.content_part.done", block)
        else:
            logprobs = logprobs_of(block.tokens, self._details)
            event = TextDoneEvent(sequence_number=number, text=text, logprobs=logprobs, **part_of(at))
            done = named_event(event) + self._part("response.content_part.done", block)
        item = item_of(self.answer, block, status_of(block), self._details)
        return done + named_event(
            ItemEvent(
                type="response.output_item.done",
                sequence_number=next(self._numbers),
                output_index=block.number,
                item=item,
            )
        )

    def _part(self, kind: PartKind, block: Block) -> bytes:
        is_reasoning = block.kind == "reasoning"
        part = ReasoningText(text=block.text) if is_reasoning else text_of(block, self._details)
        place = part_of(self._at(block))
        return named_event(PartEvent(type=kind, sequence_number=next(self._numbers), part=part, **place))

    def _at(self, block: Block) -> ItemPlace:
        return {"item_id": item_id(self.answer, block), "output_index": block.number}

    def _state(self, kind: StateKind, response: ResponseObject) -> bytes:
        return named_event(StateEvent(type=kind, sequence_number=next(self._numbers), response=response))


def part_of(at: ItemPlace) -> Place:
    """The place of an item's one part."""
    return {**at, "content_index": 0}


def more(number: int, text: str, block: Block, at: ItemPlace) -> bytes:
    """The event for more text of a block."""
    if block.kind == "call":
        return named_event(ArgumentsDeltaEvent(sequence_number=number, delta=text, **at))
    if block.kind == "reasoning":
        return named_event(ReasoningDeltaEvent(sequence_number=number, delta=text, **part_of(at)))
    return named_event(TextDeltaEvent(sequence_number=number, delta=text, **part_of(at)))
