"""POST /score and /get_score: over ASGI with a FakeEngine, and with a tiny checkpoint.

A FakeEngine's scores begin with the input's first token.

Covers server/routes/native/get_score.py.
"""

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from engine import Engine
from engine.config import EngineConfig
from engine.readouts import RewardScore
from server.schema.score import GetScoreResponse, ScoreResponse
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine
from tests.tiny_checkpoint import tiny_classifier, write_model

HELLO = [{"role": "user", "content": "a"}]


@pytest.fixture
async def engine() -> FakeEngine:
    """An engine of a reward model."""
    return FakeEngine(num_labels=1)


async def score(client: httpx.AsyncClient, path: str = "/score", **fields: Any) -> ScoreResponse:
    response = await client.post(path, json=fields)
    assert response.status_code == 200, response.text
    answer = ScoreResponse.model_validate_json(response.content)
    assert answer.model_dump_json().encode() == response.content
    return answer


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("texts", ["ab", ["ab"]])
async def test_one_input(client: httpx.AsyncClient, engine: FakeEngine, path: str, texts: Any) -> None:
    answer = await score(client, path, model="fake-model", input=texts, user="me", cache_salt="x")
    assert (answer.object, answer.model, answer.id[:6]) == ("list", "fake-model", "score-")
    [item] = answer.data
    assert (item.object, item.index, item.score) == ("score", 0, 97.0)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 0)
    [request] = engine.requests
    assert (request.readouts, request.sampling.max_tokens) == ((RewardScore(),), 0)
    assert (request.cache_salt, request.use_prefix_cache) == ("x", True)


async def test_several_inputs_are_answered_in_order(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.num_cached_tokens = 1
    answer = await score(client, input=["a", "bcd", "c"])
    assert [(item.index, item.score) for item in answer.data] == [(0, 97.0), (1, 98.0), (2, 99.0)]
    assert answer.usage.total_tokens == 5
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert engine.tokenizer.num_encodes == 1, "all together"


async def test_several_labels_are_a_list() -> None:
    async with client_for(FakeEngine(num_labels=3)) as client:
        assert [item.score for item in (await score(client, input=["a", "b"])).data] == [
            [97.0, 1.0, 2.0],
            [98.0, 1.0, 2.0],
        ]
        answer = (await client.post("/get_score", json={"chat": "a"})).json()
    assert answer["score"] == [97.0, 1.0, 2.0]


async def test_special_tokens_can_be_left_out(client: httpx.AsyncClient) -> None:
    assert (await score(client, input="bos")).data[0].score == 2.0
    assert (await score(client, input="bos", add_special_tokens=False)).data[0].score == float(ord("b"))


async def test_lightllm_scores_one_chat(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await client.post("/get_score", json={"chat": "user: a", "multimodal_params": {}})
    assert response.json() == {"score": 117.0, "prompt_tokens": 7, "finish_reason": "length"}
    GetScoreResponse.model_validate_json(response.content)
    assert engine.requests[0].readouts == (RewardScore(),)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": 1}, "input"),
        ({"input": [97, 98]}, "input"),
        ({"input": ["a", [97]]}, "input"),
        ({"input": {"messages": HELLO}}, "input"),
        ({"input": "a\0"}, "input"),
        ({"input": ["a"] * 1025}, "input"),
        ({"input": "a", "messages": HELLO}, "messages"),
        ({"input": "a", "text_1": "b"}, "text_1"),
        ({"input": "a", "use_activation": True}, "use_activation"),
        ({"input": "a", "temperature": 0}, "temperature"),
    ],
)
async def test_what_cannot_be_scored_is_refused_by_name(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str
) -> None:
    response = await client.post("/score", json=fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not engine.requests


@pytest.mark.parametrize(
    "fields",
    [{}, {"chat": ""}, {"chat": HELLO}, {"chat": 1}, {"chat": "a\0"}, {"chat": "a" * 4097}],
    ids=["none", "empty", "messages", "number", "NUL", "too long"],
)
async def test_a_chat_that_cannot_be_scored(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    response = await client.post("/get_score", json=fields)
    assert response.status_code == 400, response.text
    assert (response.json()["error_type"], "chat" in response.json()["message"]) == ("validation", True)
    assert not engine.requests


async def test_more_inputs_than_the_server_queues_are_computed_one_part_after_the_other() -> None:
    engine = FakeEngine(EngineConfig(max_num_seqs=2, max_waiting=1), num_labels=1)
    async with client_for(engine) as client:
        found = await score(client, input=[*"abcdefgh"])
    assert [entry.index for entry in found.data] == [*range(8)]
    assert [chr(request.prompt_token_ids[0]) for request in engine.requests] == [*"abcdefgh"]
    assert found.usage.total_tokens == 8


async def test_an_input_may_fill_the_context(client: httpx.AsyncClient) -> None:
    assert (await score(client, input="a" * 4096)).usage.total_tokens == 4096
    for text in ("a" * 4097, "a" * 8193):
        error = (await client.post("/score", json={"input": ["a", text]})).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


async def test_numbers_that_are_none_are_an_error(client: httpx.AsyncClient) -> None:
    response = await client.post("/score", json={"input": "nan"})
    assert response.status_code == 500
    assert "finite" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "num_labels"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, 1),
        ("/v1/chat/completions", {"messages": HELLO, "stream": True}, 1),
        ("/v1/completions", {"prompt": "a"}, 1),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0, "echo": True, "logprobs": 0}, 1),
        ("/v1/responses", {"input": "a"}, 1),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5}, 1),
        ("/generate", {"inputs": "a"}, 1),
        ("/score", {"input": "a"}, 0),
        ("/get_score", {"chat": "a"}, 0),
    ],
)
async def test_the_head_that_the_model_lacks_is_named(
    path: str, body: dict[str, Any], num_labels: int
) -> None:
    async with client_for(FakeEngine(num_labels=num_labels)) as client:
        response = await client.post(path, json=body)
        assert response.status_code == 400, response.text
        assert "score head" in response.text
        assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200


async def test_a_tiny_checkpoint_from_end_to_end(tmp_path: Path) -> None:
    model = tiny_classifier(num_labels=1)
    config = EngineConfig(
        model=str(write_model(tmp_path, model)), device="cpu", dtype="float32", kv_tokens=512, threads=1
    )
    texts = ["Hello!", "a river, a stream, and all of them", "x"]
    engine: Any = await Engine.start(config)
    try:
        ids = await engine.tokenizer.encode_batch(texts)
        async with client_for(engine) as client:
            answer = await score(client, input=texts)
            one = await client.post("/get_score", json={"chat": texts[1]})
            refused = await client.post("/v1/completions", json={"prompt": "a"})
    finally:
        await engine.stop()
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).logits.item() for prompt in ids]
    assert [item.score for item in answer.data] == pytest.approx(expected, abs=1e-4)
    assert one.json()["score"] == pytest.approx(expected[1], abs=1e-4)
    assert one.json()["prompt_tokens"] == len(ids[1])
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
