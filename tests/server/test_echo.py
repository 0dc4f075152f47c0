"""Prompts in the answer (echo, prompt_logprobs), and the best of several continuations."""

import json
from typing import Any

import httpx
import pytest

from engine.readouts import PromptLogprobs
from tests.engine.tiny_engine import tiny_engine
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine
from tests.server.test_logprobs import CHAT, TEXT, answer, body, chunks_of


async def test_echo_puts_the_prompt_in_front(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    found = await answer(client, TEXT, "say:hé", echo=True)
    assert found["choices"][0]["text"] == "say:héhé"
    ids = [ord(char) for char in "say:b"]
    response = await client.post(TEXT, json={"prompt": [ids, ids[:-1]], "echo": True, "n": 2})
    assert [choice["text"] for choice in response.json()["choices"]][:2] == ["say:bb"] * 2
    assert not any(request.readouts for request in engine.requests)


async def test_echoed_log_probabilities_begin_with_null(client: httpx.AsyncClient) -> None:
    """As lm-eval reads them: by token, and the chosen one's value stands among the best if it is one."""
    found = await answer(client, TEXT, "say:é", echo=True, logprobs=1)
    assert found["choices"][0]["logprobs"] == {
        "text_offset": [0, 1, 2, 3, 4, 5],
        "token_logprobs": [None, -0.25, -0.5, -0.75, -1.0, 0.0],
        "tokens": ["s", "a", "y", ":", "é", "é"],
        "top_logprobs": [
            None, {"A": -0.5, "a": -0.25}, {"A": -0.5, "y": -0.5}, {"A": -0.5, ":": -0.75},
            {"A": -0.5, "é": -1.0}, {"é": 0.0},
        ],
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_only_the_prompt(client: httpx.AsyncClient, engine: FakeEngine, stream: bool) -> None:
    fields: dict[str, Any] = {"echo": True, "max_tokens": 0, "logprobs": 0}
    if stream:
        chunks = await chunks_of(client, TEXT, "abc", stream_options={"include_usage": True}, **fields)
        [first], [end], usage = chunks[0]["choices"], chunks[1]["choices"], chunks[-1]["usage"]
        assert len(chunks) == 3 and (first["finish_reason"], end["text"]) == (None, "")
        choice = first | {"finish_reason": end["finish_reason"]}
    else:
        found = await answer(client, TEXT, "abc", **fields)
        choice, usage = found["choices"][0], found["usage"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.5]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 0)
    assert engine.requests[0].sampling.max_tokens == 0


async def test_a_prompt_may_fill_the_context_if_nothing_follows(client: httpx.AsyncClient) -> None:
    ids = [97] * 4096
    response = await client.post(TEXT, json={"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 1})
    assert response.status_code == 200
    assert len(response.json()["choices"][0]["logprobs"]["tokens"]) == 4096
    response = await client.post(TEXT, json={"prompt": ids, "echo": True, "max_tokens": 1})
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_streamed_echo_is_the_same(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 2, "n": 2, "return_token_ids": True}
    whole = await answer(client, TEXT, "tokens=3 delay=0.001", **fields)
    asked = [request.readouts for request in engine.requests]
    assert asked == [(PromptLogprobs(2),), ()], "one of the samples is enough"
    chunks = await chunks_of(client, TEXT, "tokens=3 delay=0.001", **fields)
    assert engine.requests[3].readouts == (PromptLogprobs(2),), "a stream waits for no other"
    for index, expected in enumerate(whole["choices"]):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == expected["text"]
        assert expected["text"].startswith("tokens=3 delay=0.001t0 ")
        for name in expected["logprobs"]:
            parts = [choice["logprobs"][name] for choice in mine if choice["logprobs"]]
            assert [entry for part in parts for entry in part] == expected["logprobs"][name], name
        ids = [token_id for choice in mine for token_id in choice["token_ids"]]
        assert ids == expected["token_ids"] == [ord("t")] * 3
        assert mine[0]["prompt_token_ids"] == expected["prompt_token_ids"]
        assert "prompt_token_ids" not in mine[1]


async def test_streamed_echo_without_more(client: httpx.AsyncClient) -> None:
    chunks = await chunks_of(client, TEXT, "tokens=3 delay=0.001", echo=True)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert texts[0] == "tokens=3 delay=0.001t0 "
    assert "".join(texts[1:]) == "t1 t2 "
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in chunks)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_prompt_logprobs_name_candidates_by_id(client: httpx.AsyncClient, path: str) -> None:
    found = await answer(client, path, "ab", prompt_logprobs=1, n=2)
    holders = [found] if path == CHAT else found["choices"]
    for holder in holders:
        assert holder["prompt_logprobs"] == [
            None,
            {
                "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
                "98": {"logprob": -0.25, "rank": 41, "decoded_token": "b"},
            },
        ]
    assert found["choices"][0]["logprobs"] is None


async def test_each_asks_for_its_own_number(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    found = await answer(client, TEXT, "ab", prompt_logprobs=3, echo=True, logprobs=1)
    choice = found["choices"][0]
    assert len(choice["prompt_logprobs"][1]) == 4
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2
    sampling = engine.requests[0].sampling
    assert (sampling.logprobs, engine.requests[0].readouts) == (1, (PromptLogprobs(3),))


async def test_the_best_are_those_with_the_highest_mean(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """The fake's samples are the less likely the larger their seed is, modulo 7."""
    prompt = {"prompt": ["tokens=2", "tokens=3"], "n": 2, "best_of": 4, "seed": 5}
    response = await client.post(TEXT, json={**prompt, "logprobs": 0})
    found = response.json()
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    means = [sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["tokens"]) for c in found["choices"]]
    assert means == [-0.0625, -1.0625, -0.125, -1.125], "seeds 7 and 8 of 5 to 8"
    assert found["usage"]["completion_tokens"] == 4 * 2 + 4 * 3, "all that was computed"
    assert found["usage"]["prompt_tokens"] == 16
    response = await client.post(TEXT, json=prompt)
    assert [choice["logprobs"] for choice in response.json()["choices"]] == [None] * 4
    assert {request.sampling.logprobs for request in engine.requests} == {0}
    await answer(client, TEXT, "a", n=2, best_of=2, stream=False)
    assert engine.requests[-1].sampling.logprobs is None, "nothing to choose"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"max_tokens": 0}, "max_tokens"),
        (TEXT, {"max_tokens": 0, "echo": False}, "max_tokens"),
        (TEXT, {"max_tokens": -1, "echo": True}, "max_tokens"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"echo": True}, "echo"),
        (CHAT, {"best_of": 2}, "best_of"),
        (TEXT, {"echo": 1}, "echo"),
        (TEXT, {"n": 3, "best_of": 2}, "best_of"),
        (TEXT, {"best_of": 21}, "best_of"),
        (TEXT, {"best_of": 17}, "best_of"),
        (TEXT, {"best_of": 2, "stream": True}, "best_of"),
        (TEXT, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (TEXT, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (TEXT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    response = await client.post(path, json=body(path, "a", **fields))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("prompt", ["<turn>ab", "a<turn> b<eos>"])
async def test_offsets_are_places_in_the_text_whatever_the_prompt_spells(prompt: str, skip: bool) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0, "skip_special_tokens": skip}
    async with tiny_engine() as engine, client_for(engine) as client:
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    told = choice["logprobs"]
    assert choice["text"].startswith(prompt.replace("<turn>", "").replace("<eos>", "") if skip else prompt)
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        is_hidden = skip and token in ("<turn>", "<eos>")
        assert is_hidden or choice["text"][offset:].startswith(token), f"{token!r} is not at {offset}"


@pytest.mark.parametrize(
    ("prompt", "more", "echoed", "text"),
    [
        (b"a\xf0\x9f\x98", b"\x80", "a", "\U0001f600"),
        (b"a\xf0\x9f\x98", b"I", "a", "\ufffdI"),
        (b"a\xf0\x9f\x98", None, "a", "\ufffd"),
        (b"\x98", b"I", "\ufffd", "I"),
        ("a\ufffd".encode(), b"I", "a\ufffd", "I"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_half_a_character_is_echoed_once(
    prompt: bytes, more: bytes | None, echoed: str, text: str, stream: bool
) -> None:
    """A prompt ends inside a character: the answer has it, whole or not, and is what follows without echo."""
    async with tiny_engine() as engine, client_for(engine) as client:
        pieces = engine.tokenizer.pieces
        token_ids = {pieces.piece(token_id).data: token_id for token_id in range(256)}
        fields: dict[str, Any] = {
            "prompt": [token_ids[bytes([byte])] for byte in prompt],
            "max_tokens": 1 if more else 0,
            "logprobs": 0,
            "stream": stream,
        }
        if more:
            fields["allowed_token_ids"] = [token_ids[more]]
        for echo in (True, False) if more else (True,):
            response = await client.post("/v1/completions", json=fields | {"echo": echo})
            assert response.status_code == 200, response.text
            lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
            choices = [json.loads(line)["choices"][0] for line in (lines if stream else [response.text])]
            whole = "".join(choice["text"] for choice in choices)
            assert whole == (echoed + text if echo else text)
            told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
            assert sum(len(found["tokens"]) for found in told) == echo * len(prompt) + bool(more)
            if more == b"I":
                assert whole[told[-1]["text_offset"][-1] :] == "I"
