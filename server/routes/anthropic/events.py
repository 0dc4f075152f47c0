"""Deltas -> the named events of the Anthropic API."""

from collections.abc import Callable, Iterable
from typing import Any

import orjson

from engine.outputs import FinishReason
from server.answer import Answer, Delta
from server.errors import anthropic_envelope
from server.parsing import content_blocks
from server.parsing.content_blocks import Block, BlockEvent, ContentBlocks, Kind, blocks_of
from server.parsing.output import ParsedDelta
from server.schema.message_events import (
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentBlock,
    Ending,
    InputPiece,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    Piece,
    Ping,
    StopReason,
    TextBlock,
    TextPiece,
    ThinkingBlock,
    ThinkingPiece,
    ToolUseBlock,
)
from server.stream import Frames, JsonTemplate, named_event

PIECES: dict[Kind, Callable[[str], Piece]] = {
    "text": lambda text: TextPiece(text=text),
    "reasoning": lambda text: ThinkingPiece(thinking=text),
    "call": lambda text: InputPiece(partial_json=text),
}


class MessageFrames(Frames):
    """message_start, each block as it grows, message_delta with reason and counts, message_stop."""

    ping = named_event(Ping())

    def __init__(self, answer: Answer, max_tokens: int) -> None:
        super().__init__(answer)
        self._max_tokens = max_tokens
        self._blocks = ContentBlocks()
        self._template: JsonTemplate | None = None  # the events of the open block's text
        self._last: Delta | None = None

    def opening(self) -> bytes:
        """The message without content. What of the prompt was cached is known later."""
        return named_event(MessageStart(message=message(self.answer)))

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the events for what begins, grows and ends; a ping follows the first block."""
        if delta.finish_reason is not None:
            self._last = delta
        return b"".join(map(self._step, self._blocks.add(delta)))

    def _step(self, event: BlockEvent) -> bytes:
        match event:
            case content_blocks.BlockStart(block):
                self._template = delta_template(block)
                start = named_event(BlockStart(index=block.number, content_block=content_block(block)))
                return start if block.number else start + named_event(Ping())
            case content_blocks.BlockDelta(_, text):
                assert self._template is not None
                return self._template.fill(text)
            case content_blocks.BlockEnd(block):
                return named_event(BlockStop(index=block.number))

    def ending(self) -> bytes:
        """The end of the answer and of the stream."""
        assert self._last is not None
        event = MessageDelta(
            delta=ending_of(self.answer, self._last, self._max_tokens), usage=usage_of(self.answer)
        )
        return named_event(event) + named_event(MessageStop())

    def failure(self, error: Exception) -> bytes:
        """The error envelope as the last event."""
        return named_event(anthropic_envelope(error))


def delta_template(block: Block) -> JsonTemplate:
    """Return the template of the events that add text to a block."""
    piece = PIECES[block.kind]
    return JsonTemplate(lambda _, text: named_event(BlockDelta(index=block.number, delta=piece(text))))


def content_block(block: Block) -> ContentBlock:
    """A block as far as it has come; a call that broke off, or has only begun, has no input."""
    if block.kind == "text":
        return TextBlock(text=block.text)
    if block.kind == "reasoning":
        return ThinkingBlock(thinking=block.text)
    return ToolUseBlock(id=block.id, name=block.name, input=call_input(block))


def call_input(block: Block) -> dict[str, Any]:
    """The input of a call; none if it is not whole, or JSON that text in UTF-8 cannot be."""
    try:
        found = orjson.loads(block.text) if block.is_complete else {}
    except orjson.JSONDecodeError:  # half of a surrogate pair, or a depth of a thousand
        return {}
    return found if isinstance(found, dict) else {}


def message(answer: Answer, blocks: Iterable[Block] = (), ending: Ending | None = None) -> Message:
    """Return the answer as a message; one that has only begun has neither blocks nor an ending."""
    return Message(
        id=answer.id,
        model=answer.model,
        content=[content_block(block) for block in blocks],
        stop_reason=ending.stop_reason if ending else None,
        stop_sequence=ending.stop_sequence if ending else None,
        usage=usage_of(answer),
    )


def whole_message(answer: Answer, delta: Delta, max_tokens: int) -> Message:
    """Return the message of an answer that is not streamed; `delta` is all of it."""
    return message(answer, blocks_of(delta), ending_of(answer, delta, max_tokens))


def usage_of(answer: Answer) -> MessageUsage:
    """Return the token counts so far; cached prompt tokens are counted apart from the others."""
    counts = answer.counts()
    return MessageUsage(
        input_tokens=counts.prompt - counts.cached,
        cache_read_input_tokens=counts.cached,
        output_tokens=counts.completion,
    )


def ending_of(answer: Answer, delta: Delta, max_tokens: int) -> Ending:
    """Return why the answer ended, from its last delta alone."""
    stopped_by = delta.stop_reason
    return Ending(
        stop_reason=stop_reason(delta, answer.counts().completion, max_tokens),
        stop_sequence=stopped_by if isinstance(stopped_by, str) else None,
    )


def stop_reason(delta: Delta, num_tokens: int, max_tokens: int) -> StopReason:
    """Return why an answer of `num_tokens` ended."""
    if delta.finish_reason is FinishReason.LENGTH:
        return "max_tokens" if num_tokens >= max_tokens else "model_context_window_exceeded"
    if isinstance(delta.stop_reason, str):
        return "stop_sequence"
    return "tool_use" if isinstance(delta, ParsedDelta) and delta.has_calls else "end_turn"
