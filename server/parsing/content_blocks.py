"""Orders an answer as blocks of text, reasoning and calls, as the Responses and Anthropic APIs need it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.outputs import FinishReason, OutputToken, TextDelta
from server.parsing.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from server.parsing.output import ParsedDelta

Kind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Block:
    """One block, numbered from 0. A call has an id and a name; its text is its arguments.

    `is_cut`: the limit of tokens ended the answer inside it. `is_complete`: the call has ended. `tokens` are
    those of the text, if the answer is not parsed and its deltas contain tokens.
    """

    number: int
    kind: Kind
    id: str = ""
    name: str = ""
    is_complete: bool = False
    is_cut: bool = False
    parts: list[str] = field(default_factory=list)
    tokens: list[OutputToken] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return all of its text so far."""
        return "".join(self.parts)


class BlockStart(NamedTuple):
    """A block begins."""

    block: Block


class BlockDelta(NamedTuple):
    """A block grows by `text`."""

    block: Block
    text: str
    tokens: tuple[OutputToken, ...] = ()


class BlockEnd(NamedTuple):
    """A block is complete, or the answer broke off in it."""

    block: Block


BlockEvent = BlockStart | BlockDelta | BlockEnd


class ContentBlocks:
    """Collects the blocks of one answer from its deltas; only the last block is open."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def add(self, delta: TextDelta | ParsedDelta) -> Iterator[BlockEvent]:
        """Add a delta; yield what it does to the blocks. The last delta ends the open block."""
        if isinstance(delta, ParsedDelta):
            for event in delta.events:
                yield from self._take(event)
        elif delta.text:
            yield from self._say("text", delta.text, delta.tokens)
        elif self._open is not None:
            self._open.tokens += delta.tokens
        if delta.finish_reason is not None:
            if self._open is not None:
                self._open.is_cut = delta.finish_reason is FinishReason.LENGTH
            yield from self._end()

    def _take(self, event: Event) -> Iterator[BlockEvent]:
        match event:
            case Content(text):
                yield from self._say("text", text)
            case Reasoning(text):
                yield from self._say("reasoning", text)
            case CallStart(_, call_id, name):
                yield from self._begin(Block(len(self.all), "call", call_id, name))
            case Arguments(_, text):
                yield from self._say("call", text)
            case CallEnd():
                self.all[-1].is_complete = True
                yield from self._end()

    def _say(self, kind: Kind, text: str, tokens: tuple[OutputToken, ...] = ()) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(Block(len(self.all), kind))
        block = self.all[-1]
        block.parts.append(text)
        block.tokens += tokens
        yield BlockDelta(block, text, tokens)

    def _begin(self, block: Block) -> Iterator[BlockEvent]:
        yield from self._end()
        self.all.append(block)
        self._open = block
        yield BlockStart(block)

    def _end(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            block, self._open = self._open, None
            yield BlockEnd(block)


def blocks_of(delta: TextDelta | ParsedDelta) -> list[Block]:
    """Return the blocks of an answer that is one delta."""
    blocks = ContentBlocks()
    for _ in blocks.add(delta):
        pass
    return blocks.all
