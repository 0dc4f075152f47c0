"""Log-probabilities and token ids in answers, streamed and not, in the words of each API."""

import json
import sys
import threading
from types import FrameType
from typing import Any

import httpx
import pytest

from engine.outputs import FinishReason, OutputToken, TextDelta, TokenPiece
from engine.request import Request, SamplingParams
from server.answer import MAX_ANSWERS_ON_LOOP, MAX_TOKENS_ON_LOOP, Answer, Delta, render
from server.logprobs import TokenDetails
from server.routes.openai.frames import ChatFrames, CompletionFrames
from server.schema.chat import ChatChunk
from server.schema.completions import CompletionChoice, CompletionChunk
from server.schema.logprobs import one_by_one
from tests.server.fake_engine import FakeEngine
from tests.server.stream_peer import Peer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


async def answer(client: httpx.AsyncClient, path: str, say: str, **fields: Any) -> dict[str, Any]:
    """The body of an answer to a prompt that orders it."""
    response = await client.post(path, json=body(path, say, **fields))
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def body(path: str, say: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": say}]} if path == CHAT else {"prompt": say}
    return prompt | fields


async def chunks_of(client: httpx.AsyncClient, path: str, say: str, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post(path, json=body(path, say, stream=True, **fields))
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n")[:-1]]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_chat_tells_each_token_with_its_bytes(client: httpx.AsyncClient) -> None:
    found = await answer(client, CHAT, "say:aé", logprobs=True, top_logprobs=2)
    assert found["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "a", "logprob": 0.0, "bytes": [97],
                "top_logprobs": [
                    {"token": "a", "logprob": 0.0, "bytes": [97]},
                    {"token": "\\xf0\\x9f\x01", "logprob": -2.0, "bytes": [240, 159, 1]},
                ],
            },
            {
                "token": "é", "logprob": -0.125, "bytes": [195, 169],
                "top_logprobs": [
                    {"token": "é", "logprob": -0.125, "bytes": [195, 169]},
                    {"token": "\\xf0\\x9f\x01", "logprob": -2.0, "bytes": [240, 159, 1]},
                ],
            },
        ],
        "refusal": None,
    }  # fmt: skip


async def test_completions_tell_tokens_in_parallel_lists(client: httpx.AsyncClient) -> None:
    found = await answer(client, TEXT, "say:aéb", logprobs=2)
    other = "bytes:\\xf0\\x9f\x01"
    assert found["choices"][0]["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [0.0, -0.125, -0.25],
        "tokens": ["a", "é", "b"],
        "top_logprobs": [{"a": 0.0, other: -2.0}, {"é": -0.125, other: -2.0}, {"b": -0.25, other: -2.0}],
    }


async def test_the_chosen_token_is_told_even_without_others(client: httpx.AsyncClient) -> None:
    found = await answer(client, TEXT, "say:ab", logprobs=0)
    assert found["choices"][0]["logprobs"]["top_logprobs"] == [{"a": 0.0}, {"b": -0.125}]
    found = await answer(client, CHAT, "say:ab", logprobs=True)
    assert [entry["top_logprobs"] for entry in found["choices"][0]["logprobs"]["content"]] == [[], []]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_nothing_is_told_unless_it_is_asked_for(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    found = await answer(client, path, "say:ab")
    assert found["choices"][0]["logprobs"] is None
    assert "token_ids" not in found["choices"][0] and "prompt_token_ids" not in found
    if path == CHAT:
        await answer(client, path, "say:ab", logprobs=False, top_logprobs=0)
    assert not any(request.return_tokens for request in engine.requests)
    assert {request.sampling.logprobs for request in engine.requests} == {None}


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_streamed_they_are_the_same(client: httpx.AsyncClient, path: str) -> None:
    fields: dict[str, Any] = {"logprobs": 3} if path == TEXT else {"logprobs": True, "top_logprobs": 3}
    fields |= {"n": 2, "return_token_ids": True}
    order = "tokens=4 delay=0.001"
    whole = await answer(client, path, order, **fields)
    chunks = await chunks_of(client, path, order, **fields)
    for index, expected in enumerate(whole["choices"]):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        ids = [token_id for choice in mine for token_id in choice.get("token_ids", ())]
        assert ids == expected["token_ids"] == [ord("t")] * 4
        told = [choice["logprobs"] for choice in mine if choice["logprobs"] is not None]
        names = ["content"] if path == CHAT else list(expected["logprobs"])
        for name in names:
            joined = [entry for logprobs in told for entry in logprobs[name]]
            assert joined == expected["logprobs"][name]
        for choice in mine:
            text = choice["delta"].get("content", "") if path == CHAT else choice["text"]
            told_text = "".join(
                (choice["logprobs"] or {}).get("tokens", ())
                if path == TEXT
                else (entry["token"] for entry in (choice["logprobs"] or {}).get("content", ()))
            )
            assert told_text == text, "each chunk tells the tokens of its own text"
    prompt_ids = [ord(char) for char in order]
    if path == CHAT:
        assert whole["prompt_token_ids"] == chunks[0]["prompt_token_ids"] == prompt_ids
    else:
        assert whole["choices"][1]["prompt_token_ids"] == prompt_ids
        assert [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks].count(prompt_ids) == 2


async def test_numbers_are_finite(client: httpx.AsyncClient) -> None:
    found = await answer(client, CHAT, "size=1 tokens=1", logprobs=True, top_logprobs=1)
    assert found["choices"][0]["logprobs"]["content"][0]["logprob"] == 0.0
    details = TokenDetails(num_logprobs=1)
    token = OutputToken(TokenPiece(1, b"x", False), 0, -float("inf"), (), is_shown=True)
    chat, text = details.chat([token]), details.completion([token])
    assert chat is not None and chat.content[0].logprob == -9999.0
    assert text is not None and text.token_logprobs == [-9999.0] and text.top_logprobs == [{"x": -9999.0}]


async def test_tokens_of_a_stop_string_are_no_part_of_the_answer(client: httpx.AsyncClient) -> None:
    fields = {"logprobs": True, "stop": ["c"], "return_token_ids": True}
    found = await answer(client, CHAT, "say:abcd", **fields)
    choice = found["choices"][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["a", "b"]
    assert choice["token_ids"] == [97, 98, 99], "but they were sampled, and count"
    assert found["usage"]["completion_tokens"] == 3
    chunks = await chunks_of(client, CHAT, "say:abcd delay=0.001", **fields)
    last = chunks[-1]["choices"][0]
    assert (last["logprobs"], last["token_ids"][-1:], last["finish_reason"]) == (None, [99], "stop")


def test_a_control_token_inside_an_answer_is_listed() -> None:
    token = OutputToken(TokenPiece(1, b"x", False), 0, -1.0, (), is_shown=True)
    hidden = OutputToken(TokenPiece(2, b"<end>", True), 1, -2.0, (), is_shown=False, is_hidden=True)
    end = hidden._replace(is_hidden=False)
    details = TokenDetails(num_logprobs=0)
    chat = details.chat((token, hidden, token._replace(offset=1), end))
    assert chat is not None and [entry.token for entry in chat.content] == ["x", "<end>", "x"]
    completion = details.completion((token, hidden, token._replace(offset=1), end))
    assert completion is not None
    assert (completion.tokens, completion.text_offset) == (["x", "<end>", "x"], [0, 1, 1])
    assert (
        TextDelta("", 1, tokens=(hidden,)).lists_tokens and not TextDelta("", 1, tokens=(end,)).lists_tokens
    )


async def test_tokens_can_be_spelled_as_their_ids(client: httpx.AsyncClient) -> None:
    fields = {"return_tokens_as_token_ids": True}
    found = await answer(client, CHAT, "say:ab", logprobs=True, top_logprobs=1, **fields)
    entry = found["choices"][0]["logprobs"]["content"][0]
    assert (entry["token"], entry["bytes"]) == ("token_id:97", [97])
    found = await answer(client, TEXT, "say:ab", logprobs=1, **fields)
    logprobs = found["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97", "token_id:98"]
    assert logprobs["top_logprobs"][0] == {"token_id:97": 0.0}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"top_logprobs": 1}, "top_logprobs"),
        (CHAT, {"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        (CHAT, {"logprobs": 1}, "logprobs"),
        (TEXT, {"logprobs": 21}, "logprobs"),
        (TEXT, {"logprobs": -1}, "logprobs"),
        (TEXT, {"logprobs": True}, "logprobs"),
        (TEXT, {"top_logprobs": 2}, "top_logprobs"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    response = await client.post(path, json=body(path, "a", **fields))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


@pytest.mark.parametrize("frames_of", [ChatFrames, CompletionFrames])
def test_chunks_with_tokens_are_chunks_of_the_schema(frames_of: Any) -> None:
    made = Answer("id-", "model", FakeEngine().model)
    made.requests = [Request("r", (1, 2), SamplingParams(max_tokens=1))]
    made.streams = [object()]  # type: ignore[list-item]
    frames = frames_of(made, None, TokenDetails(num_logprobs=1, has_ids=True))
    piece = TokenPiece(3, b"\xc3", False)
    token = OutputToken(piece, 0, -1.5, ((piece, -1.5),), is_shown=True)
    chunk = ChatChunk if frames_of is ChatFrames else CompletionChunk
    for delta in (
        TextDelta("x", 1, tokens=(token,)),
        TextDelta("x", 0),
        TextDelta("", 1, FinishReason.STOP, None, (token._replace(is_shown=False),)),
    ):
        event = frames.delta(0, delta)
        data = json.loads(event.removeprefix(b"data: "))
        chunk.model_validate(data)
        logprobs = data["choices"][0]["logprobs"]
        assert (logprobs is not None) == delta.lists_tokens, "null where nothing is shown"
        assert data["choices"][0]["token_ids"] == [3] * len(delta.tokens)
    assert frames.delta(0, TextDelta("", 1)) == b""


def told(num_tokens: int, num_top: int = 1) -> TextDelta:
    """The last delta of an answer that tells its tokens."""
    piece = TokenPiece(97, b"a", False)
    tokens = tuple(
        OutputToken(piece, place, -0.5, ((piece, -0.5),) * num_top, True) for place in range(num_tokens)
    )
    return TextDelta("a" * num_tokens, num_tokens, FinishReason.STOP, None, tokens)


class OneStream:
    """A stream with one delta."""

    num_prompt_tokens = num_cached_tokens = num_output_tokens = num_reasoning_tokens = 0

    def __init__(self, delta: TextDelta) -> None:
        self._deltas = [delta]

    def __aiter__(self) -> "OneStream":
        return self

    async def __anext__(self) -> TextDelta:
        if not self._deltas:
            raise StopAsyncIteration
        return self._deltas.pop()

    def abort(self) -> None:
        """It has ended."""


@pytest.mark.parametrize("num_tokens", [1, MAX_TOKENS_ON_LOOP, MAX_TOKENS_ON_LOOP + 1, 500])
async def test_many_tokens_are_written_off_the_loop(engine: FakeEngine, num_tokens: int) -> None:
    """Those of a backlog, or of a whole answer: each takes up to 0.2 ms."""
    here = threading.get_ident()
    writers: list[int] = []

    class Watched(ChatFrames):
        def delta(self, index: int, delta: Delta) -> bytes:
            writers.append(threading.get_ident())
            return super().delta(index, delta)

    answer = Answer("chatcmpl-", "m", engine.model)
    answer.streams = [OneStream(told(num_tokens))]  # type: ignore[list-item]
    frames = Watched(answer, None, TokenDetails(num_logprobs=1))
    peer = Peer()
    await peer.read(frames)
    text = peer.body.decode()
    assert text.count('"token":"a"') == 2 * num_tokens

    def write() -> str:
        writers.append(threading.get_ident())
        return "{}"

    await render(write, [told(num_tokens)])
    await render(write, [told(num_tokens - num_tokens // 2), told(num_tokens // 2)])
    assert len(writers) == 3
    assert {writer == here for writer in writers} == {num_tokens <= MAX_TOKENS_ON_LOOP}


@pytest.mark.parametrize("num_answers", [1, MAX_ANSWERS_ON_LOOP, MAX_ANSWERS_ON_LOOP + 1])
async def test_many_answers_are_written_off_the_loop(num_answers: int) -> None:
    writers: list[int] = []

    def write() -> str:
        writers.append(threading.get_ident())
        return "{}"

    await render(write, [TextDelta("a", 1, FinishReason.STOP)] * num_answers)
    assert (writers == [threading.get_ident()]) == (num_answers <= MAX_ANSWERS_ON_LOOP)


def test_the_json_of_many_tokens_lets_others_run() -> None:
    """Pydantic holds the GIL unless it meets Python: it does so at every token."""
    tokens = told(50, 2).tokens
    details = TokenDetails(num_logprobs=2, num_prompt_logprobs=2)
    chat, completion = details.chat(tokens), details.completion(tokens)
    assert chat is not None and completion is not None
    assert len(json.loads(chat.model_dump_json())["content"]) == 50
    assert json.loads(completion.model_dump_json()) == completion.model_dump()
    choice = CompletionChoice.model_construct(prompt_logprobs=details.prompt(tokens))
    for body in (chat, completion, choice):
        steps = 0

        def count(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal steps
            steps += event == "call" and frame.f_code is one_by_one.__code__

        sys.setprofile(count)
        try:
            body.model_dump_json()
        finally:
            sys.setprofile(None)
        assert steps >= 50
