"""Bodies made to hurt: each gets a 4xx with the error envelope, and the server goes on."""

import json
import re
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from engine.errors import InvalidRequest
from server.body import MAX_STRUCTURE, OFF_LOOP_BYTES, check_structure, is_dense, outside_strings
from server.schema.chat import ChatRequest
from server.schema.completions import CompletionRequest
from server.schema.embeddings import EmbeddingsRequest
from server.schema.errors import ErrorResponse
from server.schema.responses import ResponsesRequest
from server.schema.score import ScoreRequest
from server.schema.tokenize import DetokenizeRequest
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"
USER = '{"role": "user", "content": "hi"}'


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


def turn(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi", **fields}]}


def call(**function: Any) -> dict[str, Any]:
    return turn(role="assistant", tool_calls=[{"id": "1", "function": {"name": "f", **function}}])


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


RAW: list[tuple[str, bytes]] = [
    ("nothing", b""),
    ("half an object", b'{"messages": ['),
    ("a list", b"[]"),
    ("null", b"null"),
    ("a string", b'"x"'),
    ("not UTF-8", b'{"messages": "\xff\xfe"}'),
    ("UTF-16", '{"messages": []}'.encode("utf-16")),
    ("byte order mark", b"\xef\xbb\xbf{}"),
    ("NaN", b'{"temperature": NaN, "messages": [%s]}' % USER.encode()),
    ("Infinity", b'{"temperature": Infinity, "messages": [%s]}' % USER.encode()),
    ("an infinite exponent", b'{"temperature": 1e999, "messages": [%s]}' % USER.encode()),
    ("a number of 100,000 digits", b'{"seed": %s, "messages": [%s]}' % (b"9" * 100_000, USER.encode())),
    ("a lone surrogate", b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    ("a raw NUL", b'{"messages": [{"role": "user", "content": "\x00"}]}'),
    ("an escaped NUL", b'{"messages": [{"role": "user", "content": "a\\u0000b"}]}'),
    ("100,000 brackets", b'{"messages": ' + b"[" * 100_000),
    ("5,000 closed brackets", b'{"messages": ' + b"[" * 5_000 + b"]" * 5_000 + b"}"),
    ("a million empty lists", b'{"messages": [%s], "x": [' % USER.encode() + b"[]," * 500_000 + b"[]]}"),
    ("a million keys", b'{"messages": [%s]' % USER.encode() + b',"a":1' * 300_000 + b"}"),
    ("a million numbers", b'{"messages": [%s], "x": [' % USER.encode() + b"0," * 900_000 + b"0]}"),
    ("no messages", b"{}"),
    ("trailing text", b'{"messages": [%s]} x' % USER.encode()),
]


@pytest.mark.parametrize("body", [body for _, body in RAW], ids=[name for name, _ in RAW])
async def test_body_is_refused(client: httpx.AsyncClient, engine: FakeEngine, body: bytes) -> None:
    response = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text[:500]
    error = ErrorResponse.model_validate(response.json()).error
    assert error.type == "invalid_request_error"
    assert len(response.content) < 3000
    assert not engine.requests


FIELDS: list[tuple[dict[str, Any], str]] = [
    (chat(temperature="hot"), "temperature"),
    (chat(temperature=-0.1), "temperature"),
    (chat(temperature=2.1), "temperature"),
    (chat(temperature=True), "temperature"),
    (chat(top_p=0), "top_p"),
    (chat(top_p=1.01), "top_p"),
    (chat(top_k=-2), "top_k"),
    (chat(top_k=1.5), "top_k"),
    (chat(top_k=2**40), "top_k"),
    (chat(min_p=-1), "min_p"),
    (chat(n=True), "n"),
    (chat(n="2"), "n"),
    (chat(n=10**9), "n"),
    (chat(max_tokens=0), "max_tokens"),
    (chat(max_tokens=-1), "max_tokens"),
    (chat(max_tokens=16.0), "max_tokens"),
    (chat(max_tokens=10**25), "max_tokens"),
    (chat(max_completion_tokens=0), "max_completion_tokens"),
    (chat(min_tokens=5, max_tokens=4), "min_tokens"),
    (chat(seed=2**63), "seed"),
    (chat(seed=0.5), "seed"),
    (chat(presence_penalty=3), "presence_penalty"),
    (chat(frequency_penalty=-3), "frequency_penalty"),
    (chat(repetition_penalty=0), "repetition_penalty"),
    (chat(repetition_penalty=1e30), "repetition_penalty"),
    (chat(logit_bias={"x": 1}), "logit_bias"),
    (chat(logit_bias={"-1": 1}), "logit_bias"),
    (chat(logit_bias={"1": 101}), "logit_bias.1"),
    (chat(logit_bias={str(2**31): 1}), "logit_bias"),
    (chat(logit_bias={"9" * 50: 1}), "logit_bias"),
    (chat(logit_bias={"٣": 1}), "logit_bias"),
    (chat(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias"),
    (chat(logit_bias=[1]), "logit_bias"),
    (chat(stop=""), "stop"),
    (chat(stop=["a", ""]), "stop"),
    (chat(stop=["a"] * 17), "stop"),
    (chat(stop=[f"stop {number}" for number in range(10_000)]), "stop"),
    (chat(stop=5), "stop"),
    (chat(stop=[1]), "stop"),
    (chat(stop="x" * 2000), "stop"),
    (chat(stop="a\x00"), "stop"),
    (chat(stop_token_ids=[0x110000]), "stop_token_ids"),
    (chat(stop_token_ids=[-1]), "stop_token_ids"),
    (chat(stop_token_ids=[True]), "stop_token_ids[0]"),
    (chat(stop_token_ids=[1] * 2000), "stop_token_ids"),
    (chat(stream="yes"), "stream"),
    (chat(stream_options=5), "stream_options"),
    (chat(model=5), "model"),
    (chat(model="m" * 10_000), "model"),
    (chat(chat_template_kwargs=[]), "chat_template_kwargs"),
    (chat(reasoning_effort="enormous"), "reasoning_effort"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}
            ]
        },
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"messages": [{"role": "user", "content": "x"}] * 5000}, "messages"),
    (chat(add_generation_prompt=True, continue_final_message=True), "continue_final_message"),
    (chat(max_tokens=4096), "max_tokens"),
    (chat(max_completion_tokens=4096, max_tokens=1), "max_completion_tokens"),
    (chat(echo=True, max_tokens=0), "echo"),
    (turn(name="a\0"), "messages[0].name"),
    (turn(role="tool", tool_call_id="a\0"), "messages[0].tool_call_id"),
    (turn(role="assistant", reasoning_content="a\0"), "messages[0].reasoning_content"),
    (call(name="a\0"), "messages[0].tool_calls[0].function.name"),
    (call(arguments="a\0"), "messages[0].tool_calls[0].function.arguments"),
    (call(arguments='{"a": "\\u0000"}'), "messages[0].tool_calls[0].function.arguments"),
    (call(arguments={"a": ["\0"]}), "messages[0].tool_calls[0].function.arguments"),
    (call(arguments={"a": nested(100)}), "messages[0].tool_calls[0].function.arguments"),
    (call(arguments="[" * 100 + "]" * 100), "messages[0].tool_calls[0].function.arguments"),
    (call(arguments="[" + "[]," * 40_000 + "[]]"), "messages[0].tool_calls[0].function.arguments"),
    (chat(documents=[{"a": "\0"}]), "documents"),
    (chat(documents=[{"a\0": 1}]), "documents"),
    (chat(documents=[{"a": nested(900)}]), "documents"),
    (chat(documents=[{"a": "x" * 10_000}]), "documents"),
    (chat(documents=[{"a": [0] * 10_000}]), "documents"),
    (chat(chat_template_kwargs={"a": {"b": "\0"}}), "chat_template_kwargs"),
    (chat(chat_template_kwargs={"a": nested(900)}), "chat_template_kwargs"),
    (chat(chat_template_kwargs={"a": "x" * 10_000}), "chat_template_kwargs"),
    (turn(name="x" * 10_000), "messages"),
    (call(arguments={"a": "x" * 10_000}), "messages"),
    (turn(role="assistant", reasoning="x" * 10_000), "messages"),
]


@pytest.mark.parametrize(
    ("body", "param"), FIELDS, ids=[f"{param}-{n}" for n, (_, param) in enumerate(FIELDS)]
)
async def test_field_is_named(
    client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], param: str
) -> None:
    response = await client.post(CHAT, json=body)
    assert response.status_code == 400, response.text[:500]
    error = ErrorResponse.model_validate(response.json()).error
    assert (error.param or "") == param, error.message
    assert param.partition("[")[0].partition(".")[0] in error.message
    assert "recursion" not in error.message
    assert len(response.content) < 2000, "an error is never larger than what caused it"
    assert not engine.requests


@pytest.mark.parametrize(
    "value", ["NaN", "-Infinity", "Infinity", "1e400", "-1e400", "01", "+1", ".5", "1.", "1.e5", "hot", "'1'"]
)
async def test_what_is_no_json_value_is_told_with_its_field(client: httpx.AsyncClient, value: str) -> None:
    content = b'{"messages": [%s], "temperature" : %s, "top_p": 1}' % (USER.encode(), value.encode())
    error = (await client.post(CHAT, content=content)).json()["error"]
    assert error["param"] == "temperature", error
    assert "not valid JSON at temperature" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"stop_token_ids": [1, NaN]', "stop_token_ids"),
        ('"logit_bias": {"5": NaN}', "logit_bias"),
        ('"logit_bias": {"temperature": [{}, -Infinity]}', "logit_bias"),
        ('"stop": ["\\"}]:,\\\\", NaN]', "stop"),
        ('"user": "ö😀", "seed" : 007', "seed"),
        ('"n_predict": NaN', "n_predict"),
        ('"typical_p": NaN', "typical_p"),
        ('"top_p": 1, "top_k": 5 "temperature": 1', None),
        ('"top_p": 1, NaN', None),
        ('"peculiar": NaN', None),
        ('"peculiar": {"top_p": NaN}', None),
    ],
)
async def test_what_is_no_json_value_further_in_is_told_with_its_place(
    client: httpx.AsyncClient, fields: str, param: str | None
) -> None:
    for length in (0, 100_000):
        content = f'{{"messages": [{USER}], "suffix": "{"ö" * length}", {fields}}}'
        error = (await client.post(CHAT, content=content.encode())).json()["error"]
        assert error["param"] == param, error
        assert "line 1 column" in error["message"]


async def test_a_byte_order_mark_is_no_harm(client: httpx.AsyncClient) -> None:
    content = b'\xef\xbb\xbf{"messages": [%s]}' % USER.encode()
    assert (await client.post(CHAT, content=content)).status_code == 200


async def test_image_part_is_called_by_its_name(client: httpx.AsyncClient) -> None:
    content = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    response = await client.post(CHAT, json={"messages": [{"role": "user", "content": content}]})
    assert "'image_url' are not supported" in response.json()["error"]["message"]


async def test_error_about_large_input_is_short(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json=chat(bad_words=["x" * 5000] * 100))
    assert response.status_code == 400
    assert len(response.content) < 2000
    assert "and 97 more" in response.json()["error"]["message"]


def test_long_text_is_not_taken_for_structure() -> None:
    text = b'{"a": "' + b'[],{}:\\"' * OFF_LOOP_BYTES + b'"}'
    assert text.count(b"[") > MAX_STRUCTURE[b"["]
    check_structure(text)


TEXTS = st.text(st.sampled_from('"\\\\[{:,a\n'))
VALUES = st.recursive(TEXTS | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner))


@given(VALUES)
def test_what_is_outside_strings_is_what_is_left_without_them(value: Any) -> None:
    body = json.dumps(value).encode()
    outside = outside_strings(np.frombuffer(body, np.uint8))
    left = bytes(byte for byte, is_outside in zip(body, outside, strict=True) if is_outside)
    strings = re.compile(rb'"(?:[^"\\]|\\.)*"')
    assert left.replace(b'"', b"") == strings.sub(b"", body)


@pytest.mark.parametrize(
    "rest", [b'"' + b'\\"' * 500_000, b'"' * 500_001, b"\\" * 1_000_000, b'"[",' * 250_000]
)
def test_counting_structure_is_linear(rest: bytes) -> None:
    text = b'"%s",' % (b"[" * (MAX_STRUCTURE[b"["] + 1)) + rest
    assert is_dense(text), "else the strings are not looked for"
    check_structure(text)  # a quadratic search would take hours
    with pytest.raises(InvalidRequest):
        check_structure(b"{" * (MAX_STRUCTURE[b"{"] + 1) + text)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "application/json; charset=latin-1"}, 200),
        ({"content-type": 'Application/JSON ;charset="UTF-16"'}, 200),
        ({"content-type": "application/x-www-form-urlencoded"}, 200),
        ({"content-type": "application/vnd.x+json"}, 200),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": "application/xml"}, 415),
        ({"content-encoding": "gzip"}, 415),
        ({"origin": "http://x", "content-type": "application/json"}, 200),
        ({"origin": "http://x", "content-type": "application/x-www-form-urlencoded"}, 415),
        ({"origin": "http://x"}, 415),
    ],
)
async def test_declared_type_of_the_body(
    client: httpx.AsyncClient, headers: dict[str, str], status: int
) -> None:
    response = await client.post(CHAT, content=b'{"messages": [%s]}' % USER.encode(), headers=headers)
    assert response.status_code == status, response.text
    if status == 415:
        assert response.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize("charset", ["latin-1", "utf-16", "utf-8"])
async def test_json_is_utf8_whatever_is_declared(
    client: httpx.AsyncClient, engine: FakeEngine, charset: str
) -> None:
    """RFC 8259: there is no such parameter, and recipients that keep to the RFC pass over it."""
    headers = {"content-type": f"application/json; charset={charset}"}
    text = '{"prompt": "say:é"}'
    response = await client.post("/v1/completions", content=text.encode(), headers=headers)
    assert response.json()["choices"][0]["text"] == "é"
    for other in ("latin-1", "utf-16"):
        response = await client.post("/v1/completions", content=text.encode(other), headers=headers)
        assert response.status_code == 400
        assert "not valid JSON" in response.json()["error"]["message"]


async def test_length_given_in_two_ways(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    headers = {"content-length": "2", "transfer-encoding": "chunked"}
    response = await client.post(CHAT, content=b'{"messages": [%s]}' % USER.encode(), headers=headers)
    assert (response.status_code, response.headers["connection"]) == (400, "close")
    assert "not both" in response.json()["error"]["message"]
    assert not engine.requests


@pytest.mark.parametrize("announced", [True, False])
async def test_body_over_the_limit(engine: FakeEngine, announced: bool) -> None:
    async def pieces() -> Any:
        for _ in range(64):
            yield b" " * 1024

    async with client_for(engine, max_body_bytes=10_000) as client:
        content = b" " * 65_536 if announced else pieces()
        response = await client.post(CHAT, content=content)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert response.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "unknown_url"),
        ("POST", "/chat/completions", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/models/x", 405, "method_not_allowed"),
        ("GET", "/v1/models/none/such", 404, "model_not_found"),
    ],
)
async def test_routing_errors_have_the_envelope(
    client: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    response = await client.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    if status == 405:
        assert "OPTIONS" in response.headers["allow"]


BRANCHES: list[tuple[dict[str, Any], str, int]] = [
    (chat(early_stopping=3), "early_stopping", 2),
    (chat(guided_json=3), "guided_json", 2),
    (chat(format=3), "format", 2),
    (chat(structured_outputs={"json": 3}), "structured_outputs.json", 2),
    (chat(grammar=3), "grammar", 2),
    (chat(grammar={"type": "json"}), "grammar", 2),
    (chat(grammar={"type": "regex", "value": {}}), "grammar", 2),
    (chat(tool_choice="any"), "tool_choice", 1),
    (chat(tool_choice={"type": "any"}), "tool_choice.type", 1),
    (chat(tool_choice={}), "tool_choice.type", 1),
    (chat(logit_bias={"str": 3000}), "logit_bias.str", 1),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        2,
    ),
]


@pytest.mark.parametrize(("body", "param", "num_lines"), BRANCHES, ids=lambda value: str(value)[:50])
async def test_branches_of_unions_are_no_part_of_a_name(
    client: httpx.AsyncClient, body: dict[str, Any], param: str, num_lines: int
) -> None:
    error = (await client.post(CHAT, json=body)).json()["error"]
    assert error["param"] == param, error["message"]
    lines = error["message"].split("; ")
    assert len(set(lines)) == len(lines) == num_lines, lines
    assert all(line.startswith((f"{param}: ", f"{param}.")) for line in lines), lines


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        *(
            (ChatRequest, chat(**{name: ["x"] * 1000}))
            for name in ("allowed_token_ids", "first_token_ids", "stop_token_ids", "documents")
        ),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 1000}]}),
        (ChatRequest, chat(bad_words_ids=[["x"] * 64])),
        (ChatRequest, {"messages": [1] * 4000}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [1] * 128}]}),
        (ChatRequest, chat(logit_bias=dict.fromkeys(map(str, range(2000)), "x"))),
        (ResponsesRequest, {"input": [1] * 4000}),
        (ResponsesRequest, {"input": "a", "metadata": dict.fromkeys(map(str, range(2000)), 1)}),
        (CompletionRequest, {"prompt": [1, *"x" * 1000]}),
        (DetokenizeRequest, {"tokens": ["x"] * 1000}),
        (EmbeddingsRequest, {"input": [1, *"x" * 1000]}),
        (ScoreRequest, {"input": [1, *"x" * 1000]}),
    ],
)
def test_a_list_of_bad_items_is_one_error(model: type[BaseModel], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(fields)
    assert caught.value.error_count() == 1
