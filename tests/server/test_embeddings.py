"""POST /v1/embeddings over ASGI, with a FakeEngine whose vectors begin with the input's first token.

Covers engine/model_info.py, server/routes/openai/inputs.py and server/schema/inputs.py.
"""

import base64
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.readouts import PooledHidden
from server.schema.embeddings import EmbeddingsResponse
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine


async def embed(client: httpx.AsyncClient, **fields: Any) -> EmbeddingsResponse:
    response = await client.post("/v1/embeddings", json=fields)
    assert response.status_code == 200, response.text
    answer = EmbeddingsResponse.model_validate(response.json())
    assert answer.model_dump_json().encode() == response.content, "as the schema would write it"
    return answer


def vector(first: int, size: int = 8) -> np.ndarray:
    raw = np.array([first, 1, 2, 3, 4, 5, 6, 7][:size], np.float64)
    return raw / np.linalg.norm(raw)


@pytest.mark.parametrize(
    "inputs",
    ["ab", ["ab"], [97, 98], [[97, 98]]],
)
async def test_one_input_in_four_spellings(
    client: httpx.AsyncClient, engine: FakeEngine, inputs: Any
) -> None:
    answer = await embed(client, input=inputs, user="me")
    assert (answer.object, answer.model) == ("list", "fake-model")
    [item] = answer.data
    assert (item.object, item.index) == ("embedding", 0)
    np.testing.assert_allclose(item.embedding, vector(97), atol=1e-6)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (2, 2)
    [request] = engine.requests
    assert (request.readouts, request.sampling.max_tokens) == ((PooledHidden("mean"),), 0)


async def test_several_inputs_are_answered_in_order(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await embed(client, input=["a", "bcd", "c"])
    assert [item.index for item in answer.data] == [0, 1, 2]
    np.testing.assert_allclose(
        [item.embedding[0] for item in answer.data], [vector(97 + i)[0] for i in range(3)]
    )
    assert answer.usage.total_tokens == 5
    assert engine.tokenizer.num_encodes == 1, "all together"


async def test_there_may_be_as_many_inputs_as_in_openai(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    answer = await embed(client, input=[chr(97 + number % 26) for number in range(2048)])
    assert [item.index for item in answer.data] == [*range(2048)]
    for number in (0, 1023, 1024, 2047):
        np.testing.assert_allclose(answer.data[number].embedding, vector(97 + number % 26), atol=1e-6)
    assert answer.usage.total_tokens == 2048


async def test_base64_holds_little_endian_floats(client: httpx.AsyncClient) -> None:
    [item] = (await embed(client, input="a", encoding_format="base64")).data
    assert isinstance(item.embedding, str)
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(item.embedding), "<f4"), vector(97), atol=1e-6)


async def test_fewer_dimensions_have_length_one_again(client: httpx.AsyncClient) -> None:
    [item] = (await embed(client, input="\x01", dimensions=3)).data
    np.testing.assert_allclose(item.embedding, vector(1, 3), atol=1e-6)
    [item] = (await embed(client, input="\x01", dimensions=8)).data
    np.testing.assert_allclose(item.embedding, vector(1), atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [0x110000]}, "input"),
        ({"input": "a\0"}, "input"),
        ({"input": "a" * 4097}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 9}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "messages": []}, "messages"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({"input": "a", "pooling": "last"}, "pooling"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str
) -> None:
    response = await client.post("/v1/embeddings", json=fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not engine.requests


@pytest.mark.parametrize(
    ("matryoshka", "allowed", "refused", "words"),
    [
        (False, [8], [1, 7, 9], "must be 8: this model's vectors were not trained to be cut"),
        ((2, 4, 16), [2, 4, 8], [1, 3, 9, 16], "must be 2, 4, 8 for this model"),
        (True, [1, 3, 8], [9], "must be at most 8"),
    ],
)
async def test_dimensions_are_those_that_the_model_declares(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    matryoshka: bool | tuple[int, ...],
    allowed: list[int],
    refused: list[int],
    words: str,
) -> None:
    engine.model = replace(engine.model, matryoshka=matryoshka)
    for size in allowed:
        [item] = (await embed(client, input="a", dimensions=size)).data
        assert len(item.embedding) == size
    for size in refused:
        response = await client.post("/v1/embeddings", json={"input": "a", "dimensions": size})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "dimensions")
        assert words in error["message"] or size > 8


async def test_an_input_may_fill_the_context(client: httpx.AsyncClient) -> None:
    assert (await embed(client, input="a" * 4096)).usage.total_tokens == 4096
    response = await client.post("/v1/embeddings", json={"input": [97] * 4097})
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_the_pooling_is_the_servers() -> None:
    engine = FakeEngine(EngineConfig(pooling="last"))
    async with client_for(engine) as client:
        await embed(client, input="a", cache_salt="x")
    assert (engine.requests[0].readouts, engine.requests[0].cache_salt) == ((PooledHidden("last"),), "x")


async def test_numbers_that_are_none_are_an_error(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/embeddings", json={"input": "nan"})
    assert response.status_code == 500
    assert "finite" in response.json()["error"]["message"]
