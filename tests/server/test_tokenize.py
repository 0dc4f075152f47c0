"""Tokenizing and its opposite, over ASGI with a FakeEngine whose tokens are characters."""

import asyncio
from typing import Any

import httpx
import orjson
import pytest
from starlette.types import Message

from server.app import build_app
from server.config import ServerConfig
from server.schema.tokenize import TokenizerInfo
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine, FakeTokenizer


def ids(text: str) -> list[int]:
    return [ord(char) for char in text]


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
async def test_prompt(client: httpx.AsyncClient, path: str) -> None:
    answer = (await client.post(path, json={"prompt": "bos é", "model": "fake-model"})).json()
    assert answer == {"count": 6, "max_model_len": 4096, "tokens": [2, *ids("bos é")]}
    body = {"prompt": "bos", "add_special_tokens": False, "return_token_strs": True}
    answer = (await client.post(path, json=body)).json()
    assert (answer["tokens"], answer["token_strs"]) == (ids("bos"), ["b", "o", "s"])
    assert (await client.post(path, json={"prompt": ""})).json()["tokens"] == []


async def test_chat(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {
        "messages": [*user("hi"), {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}],
        "continue_final_message": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "documents": [{"text": "d"}],
        "reasoning_effort": "low",
    }
    answer = (await client.post("/tokenize", json=body)).json()
    assert answer["tokens"] == ids("hi yes")
    [(messages, options)] = engine.tokenizer.chats
    assert messages[1] == {"role": "assistant", "content": "yes"}
    assert options == {
        "add_generation_prompt": False,
        "continue_final_message": True,
        "template_kwargs": {
            "enable_thinking": False,
            "documents": [{"text": "d"}],
            "reasoning_effort": "low",
        },
    }
    assert not engine.requests, "nothing is generated"


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"reasoning": {"effort": "low"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    ],
)
async def test_chat_has_the_prompt_of_a_completion(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    body = {"messages": user("hi"), **fields}
    for path in ("/tokenize", "/v1/chat/completions"):
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
    first, second = engine.tokenizer.chats
    assert first == second


CALLS = "{{ messages }}{% for call in m.tool_calls %}<｜tool▁call▁begin｜>{{ call }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "takes_system", "shown"),
    [
        ("{{ messages }}", True, "<tool_call>"),
        ("{{ messages }}", False, "<tool_call>"),
        (CALLS, True, "<｜tool▁call▁begin｜>"),
        ("{{ messages }}{{ tools }}<tool_call>", True, ""),
    ],
)
async def test_chat_with_tools_has_the_prompt_of_a_completion(
    engine: FakeEngine, template: str, takes_system: bool, shown: str
) -> None:
    engine.tokenizer.chat_template = template
    engine.tokenizer.takes_system = takes_system
    body = {"messages": user("hi"), "tools": [{"type": "function", "function": {"name": "f"}}]}
    async with client_for(engine) as client:
        for path in ("/tokenize", "/v1/chat/completions"):
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
        count = await client.post("/v1/messages/count_tokens", json={"messages": user("hi")})
        assert count.status_code == 200, count.text
    first, second, _ = engine.tokenizer.chats
    assert first == second
    messages, options = first
    assert shown in "".join(messages[0]["content"])
    assert messages[0]["role"] == ("system" if shown and takes_system else "user")
    assert ("tools" in options["template_kwargs"]) is not bool(shown)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "messages: send either prompt or messages"),
        ({"prompt": "a", "messages": user("b")}, "prompt or messages"),
        ({"prompt": None}, "prompt or messages"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a\0"}, "prompt"),
        ({"prompt": "x" * 9000}, "maximum context length"),
        ({"prompt": "a", "chat_template": "x"}, "chat_template"),
        ({"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ({"messages": []}, "messages"),
        ({"messages": user(5)}, "messages[0].content"),
        ({"messages": user("a\0")}, "messages[0].content"),
        ({"messages": user("x" * 9000)}, "maximum context length"),
        ({"messages": user("bad template")}, "chat template refuses"),
        ({"messages": user("a"), "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": user("a"), "tools": [{}]}, "tools"),
        ({"messages": user("a"), "chat_template_kwargs": {"tokenize": True}}, "tokenize"),
        (
            {"messages": user("a"), "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message: it cannot be true together with add_generation_prompt",
        ),
    ],
)
async def test_bad_input_is_named(client: httpx.AsyncClient, body: dict[str, Any], words: str) -> None:
    response = await client.post("/tokenize", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert words in error["message"]
    assert error["param"], "every error has its field"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_unknown_model(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, json={"model": "other", "prompt": "a", "tokens": [1]})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
async def test_detokenize(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.post(path, json={"tokens": ids("né 🎉")})).json() == {"prompt": "né 🎉"}
    assert (await client.post(path, json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize("tokens", [[-1], [0x110000], [2**63], [True], ["1"], [1.0], "abc", None, [1] * 5000])
async def test_bad_ids_are_refused(client: httpx.AsyncClient, tokens: Any) -> None:
    response = await client.post("/detokenize", json={"tokens": tokens})
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error["param"].partition("[")[0] == "tokens"


async def test_tokenizer_info(client: httpx.AsyncClient) -> None:
    info = (await client.get("/tokenizer_info")).json()
    TokenizerInfo.model_validate(info)
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("\x02", "\x00", None)
    assert info["chat_template"] == FakeTokenizer.chat_template
    assert info["model_max_length"] == 4096


async def test_count_of_tokens(client: httpx.AsyncClient) -> None:
    assert (await client.post("/tokens", json={"text": "bos b"})).json() == {"ntokens": 6}
    body = {"text": "bos b", "parameters": {"add_special_tokens": False, "max_new_tokens": 5}}
    assert (await client.post("/tokens", json=body)).json() == {"ntokens": 5}
    response = await client.post("/tokens", json={"text": "a", "multimodal_params": {"images": [{}]}})
    assert response.status_code == 400
    assert response.json()["error"] == "multimodal_params is not supported: the model reads text only."
    assert response.json()["error_type"] == "validation"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x" * 8193}),
        ("/tokens", {"text": "x" * 8193}),
        ("/v1/messages/count_tokens", {"messages": user("x" * 8193)}),
        ("/v1/completions", {"prompt": "x" * 8193, "truncate_prompt_tokens": 5}),
        ("/v1/chat/completions", {"messages": user("x" * 8193), "truncate_prompt_tokens": 5}),
    ],
)
async def test_what_takes_long_to_tokenize_is_refused_unread(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    """A text just below is counted, or cut, though it is longer than the context."""
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert "8193 characters" in response.text
    shorter = orjson.loads(orjson.dumps(body).replace(b"x" * 8193, b"x" * 8192))
    response = await client.post(path, json=shorter)
    assert response.status_code == 200, response.text


async def test_before_the_model_is_there() -> None:
    async with client_for(None) as client:
        for path, body in (
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [1]}),
            ("/tokens", {"text": "a"}),
        ):
            assert (await client.post(path, json=body)).status_code == 503
        assert (await client.get("/tokenizer_info")).status_code == 503


async def test_more_tokens_than_can_be_listed_are_counted(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.routes.tokenize.MAX_TOKENS", 3)
    for body, param in (({"prompt": "abcd"}, "prompt"), ({"messages": user("abcd")}, "messages")):
        response = await client.post("/tokenize", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert "POST /tokens counts more" in response.json()["error"]["message"]
    assert (await client.post("/tokens", json={"text": "abcd"})).json() == {"ntokens": 4}


@pytest.mark.parametrize(
    ("path", "body", "work"),
    [
        ("/tokenize", {"prompt": "a"}, "encode_batch"),
        ("/tokenize", {"messages": user("a")}, "encode_chat"),
        ("/tokens", {"text": "a"}, "encode_batch"),
        ("/detokenize", {"tokens": [97]}, "decode"),
        ("/v1/messages/count_tokens", {"messages": user("a")}, "encode_chat"),
        ("/v1/embeddings", {"input": "a"}, "encode_batch"),
        ("/score", {"input": "a"}, "encode_batch"),
        ("/get_score", {"chat": "a"}, "encode_batch"),
        ("/generate", {"inputs": "a"}, "encode_batch"),
    ],
)
async def test_a_client_that_leaves_ends_the_work(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], work: str
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless(*args: Any, **options: Any) -> list[int]:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return []

    monkeypatch.setattr(engine.tokenizer, work, endless)
    messages = iter([{"type": "http.request", "body": orjson.dumps(body)}])

    async def receive() -> Message:
        if (message := next(messages, None)) is not None:
            return message
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        """Nobody is there."""

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [],
        "query_string": b"",
        "http_version": "1.1",
        "client": ("test", 1),
        "server": ("test", 80),
        "scheme": "http",
    }
    async with asyncio.timeout(5):
        await build_app(engine, ServerConfig.model_validate({}))(scope, receive, send)
    assert ended.is_set()


async def test_a_count_is_of_the_model_that_is_named(client: httpx.AsyncClient) -> None:
    response = await client.post("/tokens", json={"text": "a", "model": "other"})
    assert response.status_code == 404
    assert "other" in response.json()["error"]
