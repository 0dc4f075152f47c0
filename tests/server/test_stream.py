"""Streamed answers: every byte, the order of chunks, and what happens when something goes wrong."""

import asyncio
import json
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder
from starlette.types import Message

from engine.errors import EngineError
from engine.outputs import FinishReason, TextDelta
from engine.request import Request, SamplingParams
from server.answer import Answer
from server.errors import DeadlinePassed
from server.routes.openai.frames import ChatFrames, CompletionFrames
from server.schema.chat import ChatChunk
from server.schema.completions import CompletionChunk
from server.schema.sampling import StreamOptions
from server.stream import PING
from server.watch import ClientGone, SlowClient
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine, FakeStream
from tests.server.stream_peer import Chunks, Peer


def data_lines(body: str) -> list[str]:
    """The data of each event; checks that there is nothing but data lines, each followed by an empty one."""
    events = body.split("\n\n")
    assert events[-1] == "", "the last event ends with an empty line"
    assert all(event.startswith("data: ") and "\n" not in event for event in events[:-1]), body
    return [event.removeprefix("data: ") for event in events[:-1]]


async def stream(
    client: httpx.AsyncClient, path: str = "/v1/chat/completions", **fields: Any
) -> list[dict[str, Any]]:
    """The chunks of a streamed answer."""
    response = await client.post(path, json={**fields, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] in ("no-store", "no-cache")
    assert response.headers["x-accel-buffering"] == "no"
    lines = data_lines(response.text)
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


async def test_role_text_and_reason_come_in_this_order(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, **chat("tokens=3 delay=0.001"))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == "t0 t1 t2 "
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


SAYS = "say:a\u2028b\u2029c\x85d"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat(SAYS, logprobs=True)),
        ("/v1/completions", {"prompt": SAYS, "echo": True}),
        ("/v1/responses", {"input": SAYS}),
        ("/v1/messages", chat(SAYS, max_tokens=20)),
        ("/generate_stream", {"inputs": SAYS}),
    ],
)
async def test_readers_that_know_more_line_ends_see_whole_events(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    """What httpx takes for lines, and with it many clients, is what str.splitlines() does."""
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    data = [line.partition(":")[2] for line in response.text.splitlines() if line.startswith("data:")]
    said = "".join(json.dumps(json.loads(line)) for line in data if line.strip() != "[DONE]")
    assert all(escaped in said for escaped in ("\\u2028", "\\u2029", "\\u0085"))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("details", [False, True])
async def test_the_chunk_that_ends_an_answer_has_no_text(
    client: httpx.AsyncClient, path: str, details: bool
) -> None:
    prompt = "tokens=3"
    fields: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 1}
    if "chat" in path:
        fields = {"messages": [{"role": "user", "content": prompt}], "logprobs": True}
    if not details:
        del fields["logprobs"]
    response = await client.post(path, json=fields | {"stream": True, "max_tokens": 3})
    chunks = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n")[:-2]]
    *texts, [last] = [chunk["choices"] for chunk in chunks]
    assert (last["finish_reason"], last.get("text", "")) == ("stop", "")
    assert last.get("delta", {}) == {} and last.get("logprobs") is None
    assert all(choice["finish_reason"] is None for [choice] in texts)
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for [choice] in texts)
    assert text == ("" if "chat" in path else prompt) + "t0 t1 t2 "


async def test_usage_is_the_last_chunk_and_only_if_asked_for(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, **chat("tokens=3", stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3


async def test_continuous_usage_counts_up(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(client, **chat("tokens=3 delay=0.005", stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0
    assert counts[-1] == 3
    assert counts == sorted(counts)


async def test_stream_options_do_not_matter_without_a_stream(client: httpx.AsyncClient) -> None:
    response = await client.post(
        "/v1/chat/completions",
        json=chat("x", stream_options={"include_usage": True, "include_obfuscation": False}),
    )
    assert response.status_code == 200


async def test_choices_are_interleaved_after_all_roles(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, **chat("tokens=4 delay=0.002", n=3))
    assert [chunk["choices"][0]["index"] for chunk in chunks[:3]] == [0, 1, 2]
    assert all(chunk["choices"][0]["delta"].get("role") == "assistant" for chunk in chunks[:3])
    texts = dict.fromkeys(range(3), "")
    for chunk in chunks[3:]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    assert set(texts.values()) == {"t0 t1 t2 t3 "}
    assert sum(chunk["choices"][0]["finish_reason"] == "stop" for chunk in chunks) == 3


async def test_text_completions_stream_lists_of_prompts(client: httpx.AsyncClient) -> None:
    chunks = await stream(
        client, "/v1/completions", prompt=["say:ab", "say:cd"], n=2, stream_options={"include_usage": True}
    )
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "ab", 1: "ab", 2: "cd", 3: "cd"}
    assert chunks[-1]["usage"]["prompt_tokens"] == 12


async def test_fault_in_a_stream_is_an_event(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    chunks = await stream(client, **chat("tokens=5 fail=2 delay=0.001", n=2))
    assert chunks[-1]["error"] == {
        "message": "Computing this request failed.",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert not engine.live, "the other choice is ended too"


async def test_error_before_the_stream_has_its_status(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.is_full = True
    response = await client.post("/v1/chat/completions", json=chat("x", stream=True))
    assert response.status_code == 429
    assert response.headers["content-type"] == "application/json"


async def test_stream_past_its_deadline_ends_with_an_event(engine: FakeEngine) -> None:
    async with client_for(engine, request_timeout_seconds=0.5) as client:
        chunks = await stream(client, **chat("tokens=4000 delay=0.1"))
    assert chunks[-1]["error"]["code"] == "timeout"
    assert not engine.live


SAMPLING = SamplingParams(max_tokens=1)


def make_frames(kind: type[ChatFrames] | type[CompletionFrames], options: StreamOptions | None = None) -> Any:
    """Frames of an answer with two choices, and its streams."""
    engine_stream = FakeStream(Request("a", (1, 2), SAMPLING), lambda: None)
    answer = Answer.__new__(Answer)
    answer.id, answer.created, answer.model, answer.fingerprint = "x-1", 5, 'odd "model"\n\\ 名', "fp_1"
    answer.streams, answer.n = [engine_stream, engine_stream], 2  # type: ignore[list-item]
    return kind(answer, options)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1), index=st.integers(0, 1))
def test_prepared_bytes_are_the_schemas_own(text: str, index: int) -> None:
    for kind in (ChatFrames, CompletionFrames):
        for options in (
            None,
            StreamOptions(include_usage=True),
            StreamOptions(include_usage=True, continuous_usage_stats=True),
        ):
            frames = make_frames(kind, options)
            delta = TextDelta(text, 1)
            assert frames.delta(index, delta) == frames.event(
                [frames.choice(index, delta)], with_counts=frames.is_continuous
            )


@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    cuts=st.lists(st.integers(0, 400), max_size=5),
)
def test_events_cut_anywhere_are_read_whole_by_the_official_client(text: str, cuts: list[int]) -> None:
    for kind in (ChatFrames, CompletionFrames):
        frames = make_frames(kind)
        delta = frames.delta(1, TextDelta(text, 1))
        body = frames.opening() + delta + frames.delta(0, TextDelta("", 1, FinishReason.STOP))
        places = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
        pieces = [body[start:end] for start, end in pairwise(places)]
        events = [event.data for event in SSEDecoder().iter_bytes(iter(pieces))]
        assert events == data_lines(body.decode())
        choices = [json.loads(event)["choices"][0] for event in events]
        said = [choice.get("text") or choice.get("delta", {}).get("content") for choice in choices]
        assert "".join(filter(None, said)) == text


def test_every_event_parses_as_its_schema() -> None:
    options = StreamOptions(include_usage=True, continuous_usage_stats=True)
    for kind, schema in ((ChatFrames, ChatChunk), (CompletionFrames, CompletionChunk)):
        frames = make_frames(kind, options)
        body = frames.opening() + frames.delta(1, TextDelta('a\n"', 1))
        body += frames.delta(0, TextDelta("", 1, FinishReason.STOP, "###")) + frames.ending()
        lines = data_lines(body.decode())
        for line in lines[:-1]:
            schema.model_validate(json.loads(line))
        assert json.loads(lines[-3])["choices"][0]["stop_reason"] == "###"


def test_held_back_text_makes_no_event() -> None:
    assert make_frames(ChatFrames).delta(0, TextDelta("", 3)) == b""


def frames_of(engine: FakeEngine, *prompts: str, kind: Any = ChatFrames) -> Any:
    """The frames of an answer that `engine` begins to compute."""
    frames = make_frames(kind)
    sampling = SamplingParams(max_tokens=1000)
    frames.answer.streams = [
        engine.submit(Request(str(index), tuple(map(ord, prompt)), sampling))
        for index, prompt in enumerate(prompts)
    ]
    return kind(frames.answer, None)


async def test_client_that_stops_reading_is_given_up() -> None:
    engine, peer = FakeEngine(), Peer(10)
    peer.on_stop = lambda: peer.watch.interrupt(SlowClient())  # type: ignore[method-assign]
    frames = frames_of(engine, "tokens=1000 delay=0.001")
    with pytest.raises(SlowClient):
        await peer.read(frames)
    assert str(frames.answer).endswith(" ended=slow_client")
    assert engine.aborted, "the request is aborted"
    assert len(peer.messages) == 11


async def test_client_that_leaves_before_the_first_event_ends_its_request() -> None:
    engine, peer = FakeEngine(), Peer()
    peer.watch.interrupt(ClientGone())
    frames = frames_of(engine, "hang")
    with pytest.raises(ClientGone):
        await peer.read(frames)
    assert str(frames.answer).endswith(" ended=client_left")
    assert engine.aborted
    assert not peer.messages


async def test_deadline_ends_a_stream_with_an_error() -> None:
    stream, peer, chunks, reading = await begin("a")
    peer.watch.interrupt(DeadlinePassed("too long"))
    await reading
    error, done = data_lines(chunks.sent[-1].decode())
    assert (json.loads(error)["error"]["message"], done) == ("too long", "[DONE]")
    assert peer.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    with pytest.raises(EngineError, match="aborted"):
        await anext(stream)


async def test_deadline_of_a_client_that_stopped_reading_sends_it_nothing() -> None:
    engine, peer = FakeEngine(), Peer(1)
    peer.on_stop = lambda: peer.watch.interrupt(DeadlinePassed("too long"))  # type: ignore[method-assign]
    await peer.read(frames_of(engine, "tokens=2 delay=0.001"))
    assert len(peer.messages) == 2


async def test_pings_are_comments_and_bring_the_head() -> None:
    engine, has_pinged = FakeEngine(), asyncio.Event()

    class PingedPeer(Peer):
        async def send(self, message: Message) -> None:
            await super().send(message)
            if PING in message.get("body", b""):
                has_pinged.set()

    peer = PingedPeer()
    frames = frames_of(engine, "hang", kind=CompletionFrames)
    reading = asyncio.create_task(peer.read(frames, ping_seconds=0.01))
    await has_pinged.wait()
    assert [message["type"] for message in peer.messages[:2]] == ["http.response.start", "http.response.body"]
    frames.answer.streams[0].put(TextDelta("a", 1, FinishReason.STOP))
    await reading
    assert PING == b": ping\n\n"
    text, ending, done = data_lines(peer.body.replace(PING, b"").decode())
    assert json.loads(text)["choices"][0]["text"] == "a"
    assert json.loads(ending)["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"


async def begin(text: str) -> tuple[FakeStream, Peer, Chunks, "asyncio.Task[None]"]:
    """A completion whose first event has been sent in a chunk: its stream, and who reads it."""
    peer = Peer()
    chunks = Chunks(peer)
    frames = frames_of(FakeEngine(), "hang", kind=CompletionFrames)
    reading = asyncio.create_task(peer.read(frames))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not peer.messages, "nothing is sent before the first event"
    [stream] = frames.answer.streams
    stream.put(TextDelta(text, 1))
    await chunks.has_sent.wait()
    await asyncio.sleep(0)
    return stream, peer, chunks, reading


def texts_of(chunk: bytes) -> list[str]:
    """The texts of the events in a chunk."""
    return [json.loads(line)["choices"][0]["text"] for line in data_lines(chunk.decode()) if line != "[DONE]"]


async def test_head_comes_with_the_first_event_and_the_end_with_the_last() -> None:
    stream, peer, chunks, reading = await begin("a")
    stream.put(TextDelta("b", 1, FinishReason.STOP))
    await reading
    assert [texts_of(chunk) for chunk in chunks.sent] == [["a"], ["b", ""]]
    assert chunks.sent[-1].endswith(b"data: [DONE]\n\n")
    assert [message["type"] for message in peer.messages] == ["http.response.start", "http.response.body"]


async def test_text_is_sent_without_waking_the_task() -> None:
    stream, _, chunks, reading = await begin("a")
    stream.put(TextDelta("b", 1))
    assert texts_of(chunks.sent[-1]) == ["b"], "it is sent in the turn in which it comes"
    chunks.is_slow = True
    stream.put(TextDelta("c", 1))
    chunks.is_slow = False
    stream.put(TextDelta("d", 1))
    assert len(chunks.sent) == 2, "what comes later does not overtake what waits"
    stream.put(TextDelta("e", 1, FinishReason.LENGTH))
    await reading
    assert [texts_of(chunk) for chunk in chunks.sent] == [["a"], ["b"], ["cde", ""]]
    stream.put(TextDelta("f", 1))
    assert len(chunks.sent) == 3, "nothing follows the end"


async def test_bug_in_text_sent_without_the_task_ends_the_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream, _, chunks, reading = await begin("a")

    def broken(self: CompletionFrames, index: int, delta: TextDelta) -> bytes:
        raise RuntimeError("a bug")

    monkeypatch.setattr(CompletionFrames, "delta", broken)
    stream.put(TextDelta("b", 1))
    await reading
    error, done = data_lines(chunks.sent[-1].decode())
    assert (json.loads(error)["error"]["code"], done) == ("internal_error", "[DONE]")
    assert "a bug" in caplog.text


async def test_slow_reader_gets_merged_text() -> None:
    engine = FakeEngine()
    prompt = tuple(map(ord, "tokens=50"))
    streams = [engine.submit(Request(str(i), prompt, SamplingParams(max_tokens=50))) for i in range(2)]
    frames = make_frames(ChatFrames)
    frames.answer.streams = streams

    class WaitingPeer(Peer):
        async def send(self, message: Message) -> None:
            await super().send(message)
            await asyncio.gather(*(task for _, task in engine.live.values()))  # it reads on when all is said

    peer = WaitingPeer()
    await peer.read(ChatFrames(frames.answer, None))
    text = peer.body.decode()
    chunks = [json.loads(line) for line in data_lines(text)[:-1]]
    assert len(chunks) < 20, "100 tokens came in few chunks"
    for index in range(2):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in own).split() == [
            f"t{i}" for i in range(50)
        ]


async def test_bug_in_a_stream_is_told_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    frames = make_frames(ChatFrames)

    class Broken(FakeStream):
        async def __anext__(self) -> TextDelta:
            if not self.num_output_tokens:
                self.num_output_tokens = 1
                return TextDelta("a", 1)
            raise RuntimeError("/secret/path")

    for num_streams in (1, 2):
        request = Request("a", (1,), SAMPLING)
        frames.answer.streams = [Broken(request, lambda: None) for _ in range(num_streams)]
        peer = Peer()
        await peer.read(frames)
        text = peer.body.decode()
        assert "secret" not in text
        assert json.loads(data_lines(text)[-2])["error"]["code"] == "internal_error"
    assert "/secret/path" in caplog.text
