"""Beam search over HTTP, with a FakeEngine, whose likeliest token says where the beam stands.

Covers server/schema/beam.py.
"""

from typing import Any

import httpx
import pytest

from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def body(path: str, say: str = "tokens=1", **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": say}]} if path == CHAT else {"prompt": say}
    return prompt | {"use_beam_search": True, "max_tokens": 3} | fields


def texts(answer: dict[str, Any]) -> list[str]:
    return [c["message"]["content"] if "message" in c else c["text"] for c in answer["choices"]]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_best_n_of_the_beams_are_answered(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    response = await client.post(path, json=body(path, n=2, best_of=3, temperature=0.7))
    assert response.status_code == 200, response.text
    answer = response.json()
    # The fake engine says "t" everywhere, and finds the characters 1, 2, … the next likeliest.
    assert texts(answer)[0] == "ttt"
    assert len(set(texts(answer))) == 2, "two answers that differ"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == len("tokens=1")
    assert answer["usage"]["completion_tokens"] == 6
    assert len(engine.requests) == 1 + 3 + 3, "one beam at first, then three"
    assert not engine.live


async def test_each_prompt_has_a_search_of_its_own(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await client.post(TEXT, json=body(TEXT, prompt=["tokens=1", "tokens=2"], n=2, echo=True))
    found = texts(response.json())
    assert [text[:8] for text in found] == ["tokens=1", "tokens=1", "tokens=2", "tokens=2"]
    assert [text[8:] for text in found[::2]] == ["ttt", "ttt"]
    assert len(engine.requests) == 2 * (1 + 2 + 2)


async def test_log_probabilities_and_ids_stand_beside_the_text(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json=body(CHAT, logprobs=True, top_logprobs=2, return_token_ids=True))
    [choice] = response.json()["choices"]
    assert [token["token"] for token in choice["logprobs"]["content"]] == ["t", "t", "t"]
    assert all(len(token["top_logprobs"]) == 2 for token in choice["logprobs"]["content"])
    assert choice["token_ids"] == [ord("t")] * 3


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"stream": True}, "use_beam_search"),
        (TEXT, {"stream": True}, "use_beam_search"),
        (TEXT, {"stop": "x"}, "use_beam_search"),
        (TEXT, {"presence_penalty": 1}, "use_beam_search"),
        (TEXT, {"repetition_penalty": 1.1}, "use_beam_search"),
        (TEXT, {"logit_bias": {"5": 1}}, "use_beam_search"),
        (TEXT, {"allowed_token_ids": [5]}, "use_beam_search"),
        (CHAT, {"bad_words": ["x"]}, "use_beam_search"),
        (CHAT, {"bad_words_ids": [[5]]}, "use_beam_search"),
        (TEXT, {"prompt_logprobs": 1}, "use_beam_search"),
        (TEXT, {"guided_regex": "a+"}, "guided_regex"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (TEXT, {"best_of": 20}, "n"),
        (TEXT, {"echo": True, "max_tokens": 0}, "max_tokens"),
        (TEXT, {"length_penalty": "long"}, "length_penalty"),
        (TEXT, {"early_stopping": "soon"}, "early_stopping"),
        (CHAT, {"num_beams": 4}, "num_beams"),
        (CHAT, {"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        (TEXT, {"use_beam_search": None, "early_stopping": True}, "early_stopping"),
        (CHAT, {"use_beam_search": False, "best_of": 2}, "best_of"),
    ],
)
async def test_what_has_no_meaning_in_a_search_is_refused(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, fields: dict[str, Any], param: str
) -> None:
    response = await client.post(path, json=body(path) | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"] or "").split(".")[0] == param, error
    assert not engine.live


async def test_answers_that_may_hold_calls_are_not_searched_for(engine: FakeEngine) -> None:
    async with client_for(engine, tool_parser="hermes") as client:
        tools = [{"type": "function", "function": {"name": "f"}}]
        response = await client.post(CHAT, json=body(CHAT, tools=tools))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "use_beam_search"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_values_that_leave_a_field_off_are_accepted(client: httpx.AsyncClient, path: str) -> None:
    off = {"stop": None, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "min_p": 0}
    response = await client.post(path, json=body(path, length_penalty=0.5, early_stopping="never", **off))
    assert response.status_code == 200, response.text


async def test_a_fault_in_a_step_is_the_answers(client: httpx.AsyncClient) -> None:
    response = await client.post(TEXT, json=body(TEXT, "tokens=1 fail=0", n=2))
    assert response.status_code == 500, response.text
