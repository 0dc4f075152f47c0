"""Deltas of an answer -> the chunks of the OpenAI API.

A chunk is a prepared prefix and suffix around one escaped string (`JsonTemplate`). No event has an `id:` or
`event:` line: OpenAI clients stumble over them.
"""

import re
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import orjson

from engine.outputs import TextDelta
from server.answer import Answer, Counts, Delta, chat_finish_of, finish_of, usage_of
from server.logprobs import NO_DETAILS, TokenDetails
from server.routes.openai.echo import NO_ECHO, Echo
from server.schema.chat import ChatChunk, ChatChunkChoice, ChatDelta, ChatFinish
from server.schema.completions import CompletionChunk, CompletionChunkChoice
from server.schema.sampling import StreamOptions
from server.stream import DONE, Frames, JsonTemplate, error_event

NOTHING = TextDelta("", 0)

# The schema's JSON with holes for its five counts, in their order there.
USAGE = re.sub(rb"\b0\b", b"%d", usage_of(Counts(0, 0, 0, 0)).model_dump_json().encode())

ChunkChoice = ChatChunkChoice | CompletionChunkChoice


class ChunkFrames(Frames):
    """Events of the OpenAI API: chunks of one kind, then [DONE]."""

    chunk: type[ChatChunk] | type[CompletionChunk]
    kind: str

    def __init__(
        self, answer: Answer, options: StreamOptions | None, details: TokenDetails = NO_DETAILS
    ) -> None:
        super().__init__(answer)
        self.details = details
        self.with_usage = bool(options and options.include_usage)
        self.is_continuous = bool(options and self.with_usage and options.continuous_usage_stats)
        self.templates = [] if details else [self._content(index) for index in range(len(answer.streams))]

    @abstractmethod
    def choice(self, index: int, delta: Delta) -> ChunkChoice:
        """The part of a chunk that belongs to choice `index`."""

    def event(self, choices: list[ChunkChoice], *, with_counts: bool, **more: Any) -> bytes:
        """Return a chunk as one event; it has `usage`, as counts or null, only if the request wants it."""
        fields: dict[str, Any] = {
            "id": self.answer.id,
            "object": self.kind,
            "created": self.answer.created,
            "model": self.answer.model,
            "system_fingerprint": self.answer.fingerprint,
            "choices": choices,
            **more,
        }
        if self.with_usage:
            fields["usage"] = self.answer.usage() if with_counts else None
        return b"data: " + self.chunk(**fields).model_dump_json(exclude_unset=True).encode() + b"\n\n"

    def template(self, make: Callable[[str], ChunkChoice]) -> JsonTemplate:
        """Return the template of the chunks whose only choice is `make(text)`."""
        return JsonTemplate(lambda _, text: self.event([make(text)], with_counts=False))

    def _content(self, index: int) -> JsonTemplate:
        return self.template(lambda text: self.choice(index, TextDelta(text, 1)))

    def fill(self, template: JsonTemplate, text: str) -> bytes:
        """Return the event with a text, and with the token counts so far if each chunk has them."""
        if not self.is_continuous:
            return template.fill(text)
        prompt, cached, completion, reasoning = self.answer.counts()
        counts = USAGE % (prompt, completion, prompt + completion, cached, reasoning)
        return b"%b%b%b%b}\n\n" % (
            template.before,
            orjson.dumps(text),
            template.after.removesuffix(b"null}\n\n"),
            counts,
        )

    def delta(self, index: int, delta: Delta) -> bytes:
        """The events for new text and the ending, apart; text that is still held back makes none."""
        if delta.finish_reason is None and not delta.text:
            return b""
        if delta.finish_reason is not None and delta.text:
            return self._chunk(index, without_ending(delta)) + self._chunk(index, without_text(delta))
        return self._chunk(index, delta)

    def _chunk(self, index: int, delta: Delta) -> bytes:
        """The event for new text, or for the ending."""
        if delta.finish_reason is not None or self.details:
            return self.event([self.choice(index, delta)], with_counts=self.is_continuous)
        return self.fill(self.templates[index], delta.text)

    def ending(self) -> bytes:
        """Return the chunk with the token counts, if requested, and the end of the stream."""
        return (self.event([], with_counts=True) if self.with_usage else b"") + DONE

    def failure(self, error: Exception) -> bytes:
        """The error envelope as an event, and the end of the stream."""
        return error_event(error)


class ChatFrames(ChunkFrames):
    """Events of a chat completion."""

    chunk = ChatChunk
    kind = "chat.completion.chunk"

    def choice(self, index: int, delta: Delta) -> ChatChunkChoice:
        """New text; without any, the last chunk has an empty delta."""
        content = ChatDelta(content=delta.text) if delta.text else ChatDelta()
        return self.part(index, content, delta)

    def part(self, index: int, content: ChatDelta, delta: Delta) -> ChatChunkChoice:
        """`content` as the part of a chunk, with the tokens and the ending of `delta`."""
        return ChatChunkChoice(
            index=index,
            delta=content,
            logprobs=self.details.chat(delta.tokens) if delta.lists_tokens else None,
            **ending_fields(delta, chat_finish_of),
            **self.details.ids(delta.tokens),
        )

    def opening(self) -> bytes:
        """The role of each choice, once, in order: clients expect index 0 first."""
        role = ChatDelta(role="assistant", content="")
        ids = {"prompt_token_ids": self.answer.prompt_ids(0)} if self.details.has_ids else {}
        return b"".join(
            self.event([bare_choice(index, role)], with_counts=self.is_continuous, **ids)
            for index in range(len(self.answer.streams))
        )


class CompletionFrames(ChunkFrames):
    """Events of a text completion."""

    chunk = CompletionChunk
    kind = "text_completion"

    def __init__(
        self,
        answer: Answer,
        options: StreamOptions | None,
        details: TokenDetails = NO_DETAILS,
        echo: Echo = NO_ECHO,
    ) -> None:
        self._echo = echo
        self._begun: set[int] = set()
        super().__init__(answer, options, details)

    def delta(self, index: int, delta: Delta) -> bytes:
        """Return the event for new text; the first begins with the echoed prompt."""
        if index not in self._begun and (delta.text or delta.finish_reason is not None):
            self._begun.add(index)
            if self._echo or self.details:
                is_split = delta.finish_reason is not None and (self._echo.text(index) or delta.text)
                first = self._first(index, without_ending(delta) if is_split else delta)
                event = self.event([first], with_counts=self.is_continuous)
                return event + super().delta(index, without_text(delta)) if is_split else event
        return super().delta(index, delta)

    def _first(self, index: int, delta: Delta) -> CompletionChunkChoice:
        """The choice that begins with the prompt."""
        echoed = self._echo.text(index)
        more: dict[str, Any] = {}
        if self.details.has_ids:
            more["prompt_token_ids"] = self.answer.prompt_ids(index)
        if delta.prompt_tokens:
            more["logprobs"] = self.details.completion(delta.tokens, delta.prompt_tokens, len(echoed))
        return self.choice(index, delta._replace(text=echoed + delta.text)).model_copy(update=more)

    def choice(self, index: int, delta: Delta) -> CompletionChunkChoice:
        """New text."""
        logprobs = None
        if delta.lists_tokens:
            logprobs = self.details.completion(delta.tokens, (), len(self._echo.text(index)))
        return CompletionChunkChoice(
            index=index,
            text=delta.text,
            logprobs=logprobs,
            **ending_fields(delta),
            **self.details.ids(delta.tokens),
        )

    def opening(self) -> bytes:
        """Text completions have no roles."""
        return b""


def without_ending(delta: Delta) -> Delta:
    """Return the text and tokens of a delta. Some clients read no text from the chunk that ends an answer."""
    return delta._replace(finish_reason=None, stop_reason=None)


def without_text(delta: Delta) -> Delta:
    """Return the ending of a delta."""
    return delta._replace(text="", tokens=(), prompt_tokens=())


def bare_choice(index: int, delta: ChatDelta) -> ChatChunkChoice:
    """A part of a chunk that ends nothing."""
    return ChatChunkChoice(index=index, delta=delta, logprobs=None, **ending_fields(NOTHING))


def ending_fields(delta: Delta, finish: Callable[[Delta], ChatFinish] = finish_of) -> dict[str, Any]:
    """Return the fields that say why a choice ended: null in all chunks but its last."""
    if delta.finish_reason is None:
        return {"finish_reason": None}  # and no stop_reason at all: chunks leave out what is not set
    return {"finish_reason": finish(delta), "stop_reason": delta.stop_reason}
