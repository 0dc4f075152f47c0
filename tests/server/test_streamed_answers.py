"""Streamed answers of every dialect, reassembled as clients do, equal the answer that is not streamed.

The property holds for any cut of the model's text into deltas of the engine, and for any grouping of the
parser's events into deltas: a call may start in one delta and end in another, or all of it comes in the last.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.outputs import FinishReason, OutputToken, TextDelta, TokenPiece
from engine.request import Request, SamplingParams
from server.answer import Answer, Delta
from server.limits import Limits
from server.logprobs import TokenDetails
from server.parsing.events import Message
from server.parsing.formats import tool_formats
from server.parsing.formats.think import ThinkParser
from server.parsing.output import OutputParser, ParsedDelta, ParsedStream, content_of
from server.parsing.parser import Marker, Tools
from server.routes.anthropic.events import MessageFrames, whole_message
from server.routes.native import lightllm, tgi
from server.routes.openai.chat import response_of
from server.routes.openai.completions import response_of as completion_of
from server.routes.openai.echo import NO_ECHO
from server.routes.openai.frames import CompletionFrames
from server.routes.openai.parsed_chat_frames import ParsedChatFrames
from server.routes.responses.events import ResponseFrames
from server.routes.responses.items import begun, whole
from server.schema.native import GenerateRequest
from server.schema.responses import ResponsesRequest
from server.schema.sampling import StreamOptions
from server.stream import Frames
from tests.server.fake_engine import FakeEngine
from tests.server.parsing.texts import TEXTS, TOOLS, Stream, make
from tests.server.tool_chat import CALL, NOW, TOOL

MODEL = FakeEngine().model
LIMITS = Limits.of(MODEL, EngineConfig())
MAX_TOKENS = 7
NO_DETAILS = TokenDetails()
FULL_DETAILS = TokenDetails(num_logprobs=0, has_ids=True)


class Case(NamedTuple):
    """An answer of a model: its text in pieces, and how it is parsed and ends."""

    format: str
    pieces: list[str]
    tools: Tools
    finish: FinishReason
    stop: str | None

    def parsed(self, pieces: Sequence[str]) -> ParsedStream:
        """Return the parsed stream of the text in `pieces`."""
        parser = OutputParser(ThinkParser(Marker(), is_open=False), make(self.format, self.tools))
        stream = Stream(*pieces, finish=self.finish, stop=self.stop)
        stream.deltas = [
            delta._replace(tokens=(token(number, delta.text),)) for number, delta in enumerate(stream.deltas)
        ]
        return ParsedStream(cast(Any, stream), parser)

    def plain(self) -> ParsedDelta:
        """Return the answer as one delta."""
        return asyncio.run(self.parsed(self.pieces).collect())

    def deltas(self) -> list[ParsedDelta]:
        """Return the answer as the deltas of its stream."""

        async def collect() -> list[ParsedDelta]:
            return [delta async for delta in self.parsed(self.pieces)]

        return asyncio.run(collect())


def token(number: int, text: str) -> OutputToken:
    """Return the token that is the whole text of delta `number`."""
    return OutputToken(TokenPiece(number, text.encode(), False), 0, -0.5, (), is_shown=True)


def regrouped(deltas: Sequence[ParsedDelta], sizes: Iterable[int]) -> list[ParsedDelta]:
    """Return the events of `deltas` in other deltas, of `sizes` events each; the last has what is left."""
    events = [event for delta in deltas for event in delta.events]
    groups = []
    for size in sizes:
        groups.append(events[:size])
        events = events[size:]
    groups.append(events)
    last = deltas[-1]._replace(tokens=())
    unfinished = last._replace(finish_reason=None, stop_reason=None, has_calls=False)
    return [
        (unfinished if number < len(groups) - 1 else last)._replace(text=content_of(group), events=group)
        for number, group in enumerate(groups)
    ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    case = draw(st.sampled_from(TEXTS))
    parts = [draw(st.sampled_from(["", "<think>Hm.\n</think>\n", "Look: "])), case.text]
    text = "".join([*parts, draw(st.sampled_from(["", " Done.", case.text]))])
    is_cut = draw(st.booleans())
    if is_cut:
        text = text[: draw(st.integers(0, len(text)))]
    places = [0, *sorted(draw(st.lists(st.integers(0, len(text)), max_size=6))), len(text)]
    is_named, is_forced = draw(st.sampled_from([(False, False), (False, True), (True, True)]))
    return Case(
        case.format,
        [text[start:end] for start, end in pairwise(places)],
        Tools(
            TOOLS.parameters,
            parallel=not is_named and draw(st.booleans()),
            is_named=is_named,
            is_forced=is_forced,
            is_constrained=is_forced,
        ),
        FinishReason.LENGTH if is_cut and draw(st.booleans()) else FinishReason.STOP,
        "stop" if is_cut and draw(st.booleans()) else None,
    )


FORCED = Case(
    "hermes",
    [CALL[:30], CALL[30:-15], CALL[-15:], ""],
    Tools(TOOLS.parameters, parallel=False, is_named=True, is_forced=True, is_constrained=True),
    FinishReason.STOP,
    None,
)


def new_answer() -> Answer:
    answer = Answer("resp_", "model", MODEL)
    answer.requests = [Request("resp_", (1, 2), SamplingParams(MAX_TOKENS))]
    answer.streams = [cast(Any, Stream(""))]
    return answer


def bodies(frames: Frames, deltas: Iterable[Delta]) -> list[dict[str, Any]]:
    """Return the JSON of each event of a whole stream."""
    stream = frames.opening() + b"".join(frames.delta(0, delta) for delta in deltas) + frames.ending()
    lines = [line for line in stream.decode().split("\n") if line.startswith("data:")]
    return [json.loads(line.removeprefix("data:")) for line in lines if line != "data: [DONE]"]


def check_chat(answer: Answer, deltas: list[ParsedDelta], plain: ParsedDelta, details: TokenDetails) -> None:
    frames = ParsedChatFrames(answer, StreamOptions(include_usage=True), details)
    *chunks, last = bodies(frames, deltas)
    ids: Counter[str] = Counter()
    texts = {"content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    ending: dict[str, Any] = {}
    tokens: list[Any] = []
    token_ids: list[int] = []
    for chunk in chunks:
        [choice] = chunk["choices"]
        assert not ending, "nothing follows the finish reason"
        delta = choice["delta"]
        for name in texts:
            texts[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append({"name": call["function"]["name"], "arguments": ""})
                ids[call["id"]] += 1
            assert call["index"] == len(calls) - 1, "arguments belong to the newest call"
            calls[-1]["arguments"] += call["function"]["arguments"]
        tokens += (choice["logprobs"] or {"content": []})["content"]
        token_ids += choice.get("token_ids", ())
        if choice["finish_reason"] is not None:
            ending = {name: choice[name] for name in ("finish_reason", "stop_reason")}
    whole = json.loads(response_of(answer, [plain], details).model_dump_json(exclude_unset=True))
    [choice] = whole["choices"]
    assert set(ids.values()) <= {1}, "every call has an id of its own"
    assert texts["content"] == (choice["message"]["content"] or "")
    assert texts["reasoning_content"] == choice["message"].get("reasoning_content", "")
    assert calls == [call["function"] for call in choice["message"].get("tool_calls", ())]
    assert ending == {name: choice[name] for name in ("finish_reason", "stop_reason")}
    assert last["usage"] == whole["usage"]
    if details:
        assert tokens == choice["logprobs"]["content"]
        assert token_ids == choice["token_ids"]


def check_messages(answer: Answer, deltas: Sequence[Delta], plain: Delta) -> None:
    start, *events = bodies(MessageFrames(answer, MAX_TOKENS), deltas)
    *events, ending, stop = (event for event in events if event["type"] != "ping")
    assert (start["type"], ending["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    blocks: list[dict[str, Any]] = []
    pieces: list[str] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append(event["content_block"])
            is_open = True
            continue
        assert is_open and event["index"] == len(blocks) - 1, "only the last block is open"
        block = blocks[-1]
        if event["type"] == "content_block_stop":
            if block["type"] == "tool_use":
                block["input"] = "".join(pieces)
            pieces.clear()
            is_open = False
        elif event["delta"]["type"] == "input_json_delta":
            pieces.append(event["delta"]["partial_json"])
        else:
            block[block["type"]] += event["delta"][block["type"]]
    assert not is_open, "every block ends"
    calls = [block for block in blocks if block["type"] == "tool_use"]
    events_of_plain = plain.events if isinstance(plain, ParsedDelta) else ()
    for block, call in zip(calls, Message.of(events_of_plain).calls, strict=True):
        block["input"] = json.loads(block["input"]) if call.is_complete else {}
    message = json.loads(whole_message(answer, plain, MAX_TOKENS).model_dump_json())
    for block in (*blocks, *message["content"]):
        block.pop("id", None)
    assert blocks == message["content"]
    assert ending["delta"] == {name: message[name] for name in ("stop_reason", "stop_sequence")}
    assert ending["usage"] == message["usage"]


def check_responses(answer: Answer, deltas: Sequence[Delta], plain: Delta) -> None:
    response = begun(answer, ResponsesRequest(input="a"), LIMITS)
    events = bodies(ResponseFrames(answer, response, NO_DETAILS), deltas)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    texts = dict.fromkeys((item["id"] for item in added), "")
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] += event["delta"]
    for item in done:
        whole_text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert texts[item["id"]] == whole_text
    expected = json.loads(whole(response, answer, plain, NO_DETAILS).model_dump_json())
    for item in (*last["output"], *expected["output"]):
        item.pop("call_id", None)
    assert last == expected


@settings(max_examples=200)
@given(cases(), st.lists(st.integers(0, 3), max_size=12))
@example(FORCED, [])
@example(FORCED, [1, 1, 0, 1])
def test_any_cut_of_an_answer_reassembles_to_the_plain_answer(case: Case, sizes: list[int]) -> None:
    plain, deltas = case.plain(), case.deltas()
    check_chat(new_answer(), deltas, plain, FULL_DETAILS)
    for cut in (deltas, regrouped(deltas, sizes), regrouped(deltas, [])):
        check_chat(new_answer(), cut, plain, NO_DETAILS)
        check_messages(new_answer(), cut, plain)
        check_responses(new_answer(), cut, plain)


def check_completion(answer: Answer, deltas: Sequence[Delta], plain: Delta) -> None:
    choices = [chunk["choices"][0] for chunk in bodies(CompletionFrames(answer, None), deltas)]
    [whole] = completion_of(answer, [plain], 1, NO_DETAILS, NO_ECHO).choices
    assert "".join(choice["text"] for choice in choices) == whole.text
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [whole.finish_reason]
    assert choices[-1]["stop_reason"] == whole.stop_reason


def check_native(answer: Answer, deltas: Sequence[Delta], plain: Delta) -> None:
    wire = GenerateRequest.model_validate({"inputs": "a", "parameters": {"return_full_text": True}})
    *events, last = bodies(tgi.TgiFrames(answer, wire), deltas)
    whole = json.loads(tgi.response(wire, answer, [plain]).model_dump_json())
    assert last["generated_text"] == whole["generated_text"]
    assert "".join(event["token"]["text"] for event in (*events, last)) == plain.text
    assert not any(event["generated_text"] for event in events)
    *events, last = bodies(lightllm.LightllmFrames(answer, wire), deltas)
    whole = json.loads(lightllm.response(wire, answer, [plain]).model_dump_json())
    assert ["".join(event["token"]["text"] for event in (*events, last))] == whole["generated_text"]
    assert (last["finished"], last["finish_reason"]) == (True, whole["finish_reason"])
    assert not any(event["finished"] for event in events)


@settings(max_examples=100)
@given(st.lists(st.text(max_size=4), min_size=1, max_size=6), st.sampled_from(["stop", "length"]))
def test_any_cut_of_plain_text_reassembles_to_the_plain_answer(pieces: list[str], reason: str) -> None:
    finish = FinishReason(reason)
    deltas = [TextDelta(piece, 1) for piece in pieces]
    deltas[-1] = deltas[-1]._replace(finish_reason=finish)
    plain = TextDelta("".join(pieces), len(pieces), finish)
    for check in (check_completion, check_native, check_messages, check_responses):
        check(new_answer(), deltas, plain)


def test_every_format_is_tried() -> None:
    assert {text.format for text in TEXTS} == set(tool_formats())


@pytest.mark.parametrize(
    "choice", [{"type": "tool", "name": "get_weather"}, {"type": "any", "disable_parallel_tool_use": True}]
)
async def test_a_streamed_message_that_ends_in_a_forced_call(
    thinker: httpx.AsyncClient, choice: dict[str, Any]
) -> None:
    functions = [found["function"] for found in (TOOL, NOW)]
    request = {
        "max_tokens": 500,
        "messages": [{"role": "user", "content": f"say:{CALL}"}],
        "tools": [
            {"name": found["name"], "input_schema": found.get("parameters", {"type": "object"})}
            for found in functions
        ],
        "tool_choice": choice,
    }
    plain = (await thinker.post("/v1/messages", json=request)).json()
    response = await thinker.post("/v1/messages", json={**request, "stream": True})
    lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == plain["stop_reason"] == "tool_use"
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert json.loads("".join(pieces)) == plain["content"][0]["input"] == {"city": "Paris"}
