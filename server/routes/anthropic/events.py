"""Text deltas -> the named events of the Anthropic API."""

from uuid import uuid4

import orjson
from sse_starlette import ServerSentEvent

from engine.outputs import FinishReason
from server.answer import Answer, Delta
from server.errors import anthropic_envelope
from server.schema.anthropic import (
    BlockDelta,
    BlockStart,
    BlockStop,
    Ending,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    StopReason,
    TextBlock,
    TextPiece,
)
from server.stream import Frames, named_event


class MessageFrames(Frames):
    """message_start, the block of text as it grows, message_delta with reason and counts, message_stop."""

    ping = ServerSentEvent(Ping().model_dump_json(), event="ping", sep="\n")

    def __init__(self, answer: Answer, max_tokens: int) -> None:
        super().__init__(answer)
        self._max_tokens = max_tokens
        self._is_block_open = False
        self._last: Delta | None = None
        mark = uuid4().hex
        piece = named_event(BlockDelta(index=0, delta=TextPiece(text=mark)))
        self._before, self._after = piece.split(b'"' + mark.encode() + b'"')

    def opening(self) -> bytes:
        """The message without content. What of the prompt was cached is known later."""
        return named_event(MessageStart(message=message(self.answer, None, self._max_tokens)))

    def delta(self, index: int, delta: Delta) -> bytes:
        """New text; the first opens the block."""
        if delta.finish_reason is not None:
            self._last = delta
        if not delta.text:
            return b""
        opening = b""
        if not self._is_block_open:
            self._is_block_open = True
            opening = named_event(BlockStart(index=0, content_block=TextBlock(text=""))) + named_event(Ping())
        return opening + self._before + orjson.dumps(delta.text) + self._after

    def ending(self) -> bytes:
        """The end of the block, of the answer and of the stream."""
        assert self._last is not None
        whole = message(self.answer, self._last, self._max_tokens)
        assert whole.stop_reason is not None
        ending = Ending(stop_reason=whole.stop_reason, stop_sequence=whole.stop_sequence)
        closing = named_event(BlockStop(index=0)) if self._is_block_open else b""
        return (
            closing + named_event(MessageDelta(delta=ending, usage=whole.usage)) + named_event(MessageStop())
        )

    def failure(self, error: Exception) -> bytes:
        """The error envelope as the last event."""
        return named_event(anthropic_envelope(error))


def message(answer: Answer, delta: Delta | None, max_tokens: int) -> Message:
    """The answer as a message; without a delta it has only begun."""
    counts = answer.usage()
    cached = counts.prompt_tokens_details.cached_tokens
    stopped_by = delta.stop_reason if delta is not None else None
    return Message(
        id=answer.id,
        model=answer.model,
        content=[TextBlock(text=delta.text)] if delta is not None and delta.text else [],
        stop_reason=stop_reason(delta, counts.completion_tokens, max_tokens) if delta is not None else None,
        stop_sequence=stopped_by if isinstance(stopped_by, str) else None,
        usage=MessageUsage(
            input_tokens=counts.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=counts.completion_tokens,
        ),
    )


def stop_reason(delta: Delta, num_tokens: int, max_tokens: int) -> StopReason:
    """Why an answer of `num_tokens` ended."""
    if delta.finish_reason is FinishReason.LENGTH:
        return "max_tokens" if num_tokens >= max_tokens else "model_context_window_exceeded"
    return "stop_sequence" if isinstance(delta.stop_reason, str) else "end_turn"
