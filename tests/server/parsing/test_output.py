"""OutputParser and ParsedStream."""

import json
from typing import Any, cast

from engine.control_tokens import MARK
from engine.outputs import FinishReason
from server.parsing.events import Content, Message, Reasoning
from server.parsing.formats.think import ThinkParser
from server.parsing.output import MAX_CHARS_ON_LOOP, OutputParser, ParsedStream
from server.parsing.parser import Marker, Tools
from tests.server.parsing.texts import TOOLS, Stream, make

CALL = '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'


def parser(tools: Tools | None = TOOLS, *, thinks: bool = True, shows_reasoning: bool = True) -> OutputParser:
    return OutputParser(
        ThinkParser(Marker(), is_open=False) if thinks else None,
        make("hermes", tools) if tools else None,
        shows_reasoning=shows_reasoning,
    )


def parsed(stream: Any, answer: OutputParser) -> ParsedStream:
    return ParsedStream(cast(Any, stream), answer)


async def test_deltas_hold_their_events_and_their_content() -> None:
    stream = parsed(Stream("<think>Hm.</think>", f"So: {CALL}", ""), parser())
    deltas = [delta async for delta in stream]
    assert deltas[0].events == [Reasoning("Hm.")]
    assert [delta.text for delta in deltas] == ["", "So:", ""]
    assert [delta.has_calls for delta in deltas] == [False, False, True]
    assert deltas[-1].finish_reason is FinishReason.STOP
    counts = (stream.num_prompt_tokens, stream.num_cached_tokens)
    assert (*counts, stream.num_output_tokens, stream.num_reasoning_tokens) == (1, 2, 3, 4)


async def test_collecting_gives_what_streaming_gives() -> None:
    texts = ["<think>Hm.</think>", f"So: {CALL}", f"and {CALL.replace('1', '2')}", " done"]
    streamed = [event async for delta in parsed(Stream(*texts), parser()) for event in delta.events]
    whole = await parsed(Stream(*texts), parser()).collect()
    assert [(call.name, call.arguments) for call in Message.of(whole.events).calls] == [
        (call.name, call.arguments) for call in Message.of(streamed).calls
    ]
    assert (whole.text, whole.num_tokens, whole.has_calls) == ("So:and done", 4, True)


async def test_an_answer_that_is_full_ends_at_once() -> None:
    for collected in (True, False):
        source = Stream(CALL, "more", "and more", finish=FinishReason.LENGTH)
        stream = parsed(source, parser(Tools(TOOLS.parameters, parallel=False)))
        if collected:
            last = await stream.collect()
        else:
            [last] = [delta async for delta in stream]
        assert (last.finish_reason, last.stop_reason, last.has_calls) == (FinishReason.STOP, None, True)
        assert source.num_aborts and len(source.deltas) == 2


async def test_an_answer_ends_with_a_call_that_repeats_another() -> None:
    other = CALL.replace("1", "2")
    again = CALL.replace('"a": 1', ' "a":1 ')
    for collected in (True, False):
        source = Stream(CALL, other, again + other, "more", finish=FinishReason.LENGTH)
        stream = parsed(source, parser())
        deltas = [await stream.collect()] if collected else [delta async for delta in stream]
        assert (deltas[-1].finish_reason, deltas[-1].has_calls) == (FinishReason.STOP, True)
        assert source.num_aborts and len(source.deltas) == 1
        calls = Message.of(event for delta in deltas for event in delta.events).calls
        assert [json.loads(call.arguments)["a"] for call in calls] == [1, 2, 1]
        assert all(call.is_complete for call in calls)


async def test_an_answer_that_broke_off_has_no_complete_calls() -> None:
    half = CALL[:45]
    for finish, stop in ((FinishReason.LENGTH, None), (FinishReason.STOP, "x")):
        delta = await parsed(Stream(CALL + half, finish=finish, stop=stop), parser()).collect()
        assert not delta.has_calls
        assert [call.is_complete for call in Message.of(delta.events).calls] == [True, False]


async def test_long_text_is_parsed_as_well() -> None:
    long = "word " * MAX_CHARS_ON_LOOP
    delta = await parsed(Stream(long + CALL), parser()).collect()
    assert (delta.text, delta.has_calls) == (long.rstrip(), True)


def test_marks_never_leave() -> None:
    answer = parser(None, thinks=False)
    assert answer.feed(f"a{MARK}b") == [Content("ab")]
    assert answer.feed(MARK) == []
    assert answer.finish(is_cut=False) == []


def test_reasoning_may_be_dropped() -> None:
    answer = parser(shows_reasoning=False)
    assert answer.feed("<think>Hm.</think>4") == [Content("4")]
