"""Other names of what is there mean the same, and a prompt can be cut to fit."""

from typing import Any

import httpx
import pytest

from engine.text.infill import InfillTokens
from tests.server.fake_engine import FakeEngine

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abcdef"}]})
TEXT = ("/v1/completions", {"prompt": "abcdef"})
BOTH = pytest.mark.parametrize(("path", "body"), [CHAT, TEXT], ids=["chat", "completions"])


async def error_of(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[str, str]:
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


@BOTH
@pytest.mark.parametrize(
    ("name", "field", "value", "expected"),
    [
        ("max_new_tokens", "max_tokens", 3, 3),
        ("max_output_tokens", "max_tokens", 3, 3),
        ("n_predict", "max_tokens", 3, 3),
        ("num_predict", "max_tokens", 3, 3),
        ("min_new_tokens", "min_tokens", 2, 2),
        ("repeat_penalty", "repetition_penalty", 1.25, 1.25),
        ("random_seed", "seed", 7, 7),
        ("stop_sequences", "stop", ["x", "y"], ("x", "y")),
        ("stopping_strings", "stop", "x", ("x",)),
        ("no_stop_trim", "include_stop_str_in_output", True, True),
    ],
)
async def test_another_name_means_the_same(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    path: str,
    body: dict[str, Any],
    name: str,
    field: str,
    value: Any,
    expected: Any,
) -> None:
    for fields in ({name: value}, {name: value, field: value}, {name: value, field: None}):
        response = await client.post(path, json=body | fields)
        assert response.status_code == 200, response.text
        assert getattr(engine.requests[-1].sampling, field) == expected
    response = await client.post(path, json=body | {name: None})
    assert response.status_code == 200, "null is no value under any name"
    other = {"max_tokens": 9, "seed": 8, "stop": ["z"]}.get(field, False if value is True else 1)
    assert (await error_of(client, path, body | {name: value, field: other}))[0] == name
    param, message = await error_of(client, path, body | {name: {"wrong": 1}})
    assert param.startswith(name), f"the client has never heard of another name: {message}"
    assert name in message


@BOTH
async def test_other_names_of_other_things(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    await client.post(path, json=body | {"extra_key": "me", "n_predict": -1, "max_tokens": 5})
    assert (engine.requests[0].cache_salt, engine.requests[0].sampling.max_tokens) == ("me", 5)
    param, message = await error_of(client, path, body | {"max_new_tokens": 3, "num_predict": 4})
    assert (param, "max_new_tokens" in message) == ("num_predict", True)


async def test_completions_know_the_limit_of_chat_by_its_name(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await client.post(TEXT[0], json=TEXT[1] | {"max_completion_tokens": 3})
    assert engine.requests[0].sampling.max_tokens == 3
    await client.post(CHAT[0], json=CHAT[1] | {"max_completion_tokens": 3, "max_tokens": 4})
    assert engine.requests[1].sampling.max_tokens == 3, "in chat the newer name wins"


@BOTH
@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, "ef"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, "ef"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, "ab"),
        ({"truncate_prompt_tokens": 6}, "abcdef"),
        ({"truncate_prompt_tokens": 4097}, "abcdef"),
        ({"truncate_prompt_tokens": -1}, "abcdef"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 4093}, "def"),
        ({"truncation_side": "left"}, "abcdef"),
    ],
)
async def test_a_prompt_is_cut(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    path: str,
    body: dict[str, Any],
    fields: dict[str, Any],
    kept: str,
) -> None:
    response = await client.post(path, json=body | fields)
    assert response.status_code == 200, response.text
    assert "".join(map(chr, engine.requests[0].prompt_token_ids)) == kept
    assert response.json()["usage"]["prompt_tokens"] == len(kept)


async def test_what_does_not_fit_is_cut_to_what_does(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for path, body in (
        (CHAT[0], {"messages": [{"role": "user", "content": "x" * 5000}]}),
        (TEXT[0], {"prompt": "x" * 5000, "max_tokens": 1}),
    ):
        response = await client.post(path, json=body | {"truncate_prompt_tokens": -1})
        assert response.status_code == 200, response.text
        assert len(engine.requests[-1].prompt_token_ids) == 4095, "one place is left for the answer"


async def test_only_what_is_left_of_a_prompt_is_echoed(client: httpx.AsyncClient) -> None:
    for prompt, text in (("abcdef", "ef"), ([65, 66, 67], "BC")):
        body = {"prompt": prompt, "truncate_prompt_tokens": 2, "echo": True, "max_tokens": 0}
        response = await client.post("/v1/completions", json=body)
        assert [choice["text"] for choice in response.json()["choices"]] == [text]


@BOTH
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens"),
        ({"truncation_side": "right"}, "truncation_side"),
        ({"truncation_side": "middle", "truncate_prompt_tokens": 2}, "truncation_side"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 4096}, "max_tokens"),
    ],
)
async def test_cuts_that_cannot_be(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    assert (await error_of(client, path, body | fields))[0] == param


async def test_a_suffix_has_its_place_in_the_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.tokenizer.infill = InfillTokens(1, 2, 3)
    body = {"prompt": "a", "suffix": "b", "truncate_prompt_tokens": 1}
    assert (await error_of(client, "/v1/completions", body))[0] == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
        ("/v1/responses", {"input": "a"}),
    ],
)
async def test_other_dialects_have_their_own_names(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    for name in ("max_new_tokens", "random_seed", "truncate_prompt_tokens"):
        response = await client.post(path, json=body | {name: 5})
        assert response.status_code == 400
        assert name in response.json()["error"]["message"]
    response = await client.post(path, json=body | {"n_predict": -1, "repeat_penalty": 1.0})
    assert response.status_code == 200, response.text
