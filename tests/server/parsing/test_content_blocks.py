"""ContentBlocks: one after the other, numbered, and the same however the answer comes."""

from engine.outputs import FinishReason, TextDelta
from server.parsing.content_blocks import Block, BlockDelta, BlockEnd, BlockStart, ContentBlocks, blocks_of
from server.parsing.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from server.parsing.output import ParsedDelta

EVENTS: list[Event] = [
    Reasoning("Hm"),
    Reasoning("."),
    Content("I "),
    Content("look."),
    CallStart(0, "c0", "f"),
    Arguments(0, "{"),
    Arguments(0, "}"),
    CallEnd(0),
    CallStart(1, "c1", "g"),
    Arguments(1, '{"a"'),
]


def parsed(events: list[Event], finish: FinishReason | None = None) -> ParsedDelta:
    return ParsedDelta("", len(events), finish, None, events)


def shown(block: Block) -> tuple[object, ...]:
    return block.number, block.kind, block.id, block.name, block.text, block.is_complete, block.is_cut


WHOLE = [
    (0, "reasoning", "", "", "Hm.", False, False),
    (1, "text", "", "", "I look.", False, False),
    (2, "call", "c0", "f", "{}", True, False),
    (3, "call", "c1", "g", '{"a"', False, True),
]


def test_blocks_are_the_same_at_once_and_event_by_event() -> None:
    assert [shown(block) for block in blocks_of(parsed(EVENTS, FinishReason.LENGTH))] == WHOLE
    blocks = ContentBlocks()
    steps = [step for event in EVENTS for step in blocks.add(parsed([event]))]
    steps += blocks.add(parsed([], FinishReason.LENGTH))
    assert [shown(block) for block in blocks.all] == WHOLE
    places = [(type(step), step.block.number) for step in steps]
    assert places == sorted(places, key=lambda place: place[1]), "one after the other"
    for number in range(4):
        own = [kind for kind, found in places if found == number]
        assert (own[0], own[-1], set(own[1:-1])) == (BlockStart, BlockEnd, {BlockDelta})


def test_plain_text_is_one_block_and_none_is_none() -> None:
    assert [shown(block) for block in blocks_of(TextDelta("a", 1, FinishReason.STOP))] == [
        (0, "text", "", "", "a", False, False)
    ]
    assert blocks_of(TextDelta("", 1, FinishReason.STOP)) == []


def test_a_limit_behind_a_whole_call_cuts_nothing() -> None:
    [call] = blocks_of(parsed(EVENTS[4:8], FinishReason.LENGTH))
    assert call.is_complete and not call.is_cut
