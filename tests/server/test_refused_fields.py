"""Every known field acts in a dialect, is refused by name, or is a published no-op."""

from typing import Annotated, Any

import httpx
import pytest

from server.routes.table import ENDPOINTS, REFUSED
from server.schema.aliases import aliases_of
from server.schema.anthropic import CountTokensRequest, MessagesRequest
from server.schema.chat import ChatRequest
from server.schema.completions import CompletionRequest
from server.schema.dialects import KnownFields, refused_tables
from server.schema.embeddings import EmbeddingsRequest
from server.schema.foreign import FOREIGN, NO_OPS
from server.schema.generate_parameters import GenerateParameters
from server.schema.native import GenerateRequest
from server.schema.refused_fields import Refused
from server.schema.responses import ResponsesRequest
from server.schema.score import ScoreRequest
from server.schema.tokenize import TokenizeRequest
from server.schema.wire import ModelRequest, Wire, WireRequest, wire_of
from tests.server.fake_engine import FakeEngine

HELLO = [{"role": "user", "content": "a"}]
DIALECTS: dict[str, tuple[str, dict[str, Any], type[WireRequest]]] = {
    "chat": ("/v1/chat/completions", {"messages": HELLO}, ChatRequest),
    "completions": ("/v1/completions", {"prompt": "a"}, CompletionRequest),
    "responses": ("/v1/responses", {"input": "a"}, ResponsesRequest),
    "messages": ("/v1/messages", {"messages": HELLO, "max_tokens": 5}, MessagesRequest),
    "embeddings": ("/v1/embeddings", {"input": "a"}, EmbeddingsRequest),
    "score": ("/score", {"input": "a"}, ScoreRequest),
    "generate": ("/generate", {"inputs": "a"}, GenerateRequest),
    "parameters": ("/generate", {"inputs": "a"}, GenerateParameters),
}
KNOWN = KnownFields(endpoint.request for endpoint in ENDPOINTS if endpoint.request is not None)
FIELDS_OF_ALL = {name for request in REFUSED for name in request.model_fields}
ALIASES = {alias for request in REFUSED for wire in wire_of(request).values() for alias in wire.aliases}
REFUSED_BY_ANY = {name for table in REFUSED.values() for name in table}


def body_of(dialect: str, **fields: Any) -> dict[str, Any]:
    """A request with further fields."""
    body = DIALECTS[dialect][1]
    return body | ({"parameters": fields} if dialect == "parameters" else fields)


def test_tables_of_a_new_request_follow_from_its_fields() -> None:
    class ScoreRequest(ModelRequest):
        DIALECT = "score"
        pairs: Annotated[list[str] | None, Wire(neutral=([],))] = None

    tables = refused_tables([ChatRequest, ScoreRequest])
    assert tables[ScoreRequest]["min_p"] == Refused((0,), "it is a field of chat")
    assert tables[ScoreRequest]["repeat_penalty"] == Refused((1,), "it is a field of chat")
    assert tables[ChatRequest]["pairs"] == Refused(([],), "it is a field of score")
    assert "model" not in tables[ScoreRequest]


def test_metadata_of_a_field_is_the_same_wherever_it_is_declared() -> None:
    found: dict[str, Wire] = {}
    for request in REFUSED:
        for name, wire in wire_of(request).items():
            if wire != Wire():
                assert name not in NO_OPS
                first = found.setdefault(name, wire)
                assert wire.neutral == first.neutral, name
                assert wire.same_as == first.same_as, name


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_known_field_is_declared_or_refused_or_published(dialect: str) -> None:
    """What any endpoint knows, acting or not, no dialect ignores."""
    _, _, request = DIALECTS[dialect]
    for name in (*FIELDS_OF_ALL, *REFUSED_BY_ANY, *FOREIGN, *ALIASES):
        assert name in {*request.model_fields, *aliases_of(request), *REFUSED[request], *NO_OPS}, name


@pytest.mark.parametrize(
    ("path", "body", "request_model"),
    [
        ("/tokenize", {"messages": HELLO}, TokenizeRequest),
        ("/v1/messages/count_tokens", {"messages": HELLO}, CountTokensRequest),
    ],
)
async def test_what_shapes_a_prompt_is_not_ignored_where_it_is_counted(
    client: httpx.AsyncClient,
    path: str,
    body: dict[str, Any],
    request_model: type[WireRequest],
) -> None:
    prompt_fields, refused = KNOWN.prompt_fields, REFUSED[request_model]
    assert prompt_fields == (request_model.model_fields.keys() & prompt_fields) | refused.keys()
    assert KNOWN.fields.keys() >= prompt_fields
    for name, field in refused.items():
        response = await client.post(path, json=body | {name: {"no": "such value"}})
        assert response.status_code == 400, (name, response.text)
        assert f"{name} is not supported" in response.text
        for value in (None, *field.neutral):
            response = await client.post(path, json=body | {name: value})
            assert response.status_code == 200, (name, value, response.text)
    rest = {"max_tokens": 5, "temperature": 0, "stream": True, "stop": "x", "guided_json": {}, "n": 2}
    assert (await client.post(path, json=body | rest)).status_code == 200, (
        "the rest of a request is no matter"
    )


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_what_has_no_effect_is_refused_by_its_name(
    client: httpx.AsyncClient, engine: FakeEngine, dialect: str
) -> None:
    path, _, request = DIALECTS[dialect]
    for name in REFUSED[request]:
        response = await client.post(path, json=body_of(dialect, **{name: {"no": "such value"}}))
        assert response.status_code == 400, (name, response.text)
        assert name in response.text
    assert not engine.requests


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_what_leaves_everything_as_it_is_is_accepted(client: httpx.AsyncClient, dialect: str) -> None:
    path, _, request = DIALECTS[dialect]
    for name, field in REFUSED[request].items():
        if name in request.model_fields:
            continue
        for value in (None, *field.neutral):
            response = await client.post(path, json=body_of(dialect, **{name: value}))
            assert response.status_code == 200, (name, value, response.text)


@pytest.mark.parametrize(
    ("dialect", "name", "value"),
    [
        ("responses", "guided_json", {}),  # any JSON
        ("responses", "prompt_logprobs", 0),  # those of the prompt's own tokens
        ("messages", "include_reasoning", False),
        ("messages", "separate_reasoning", False),
        ("messages", "parallel_tool_calls", False),
        ("parameters", "logprobs", 0),
        ("generate", "max_tokens", 5),
        ("generate", "logprobs", True),
        ("parameters", "prompt_logprobs", 0),
        ("parameters", "disable_prompt_cache", True),
        ("parameters", "tools", [{"type": "function"}]),
        ("chat", "text", {"format": {"type": "json_object"}}),
        ("chat", "output_config", {"format": {"type": "json_schema", "schema": {}}}),
        ("chat", "max_tool_calls", 1),
        ("completions", "conversation", "x"),
        ("messages", "previous_response_id", "x"),
        ("messages", "truncation", "auto"),
        ("responses", "mcp_servers", [{}]),
        ("responses", "regular_constraint", "a"),
        ("generate", "text", {"format": {"type": "json_object"}}),
        ("embeddings", "temperature", 0),
        ("embeddings", "max_tokens", 1),
        ("embeddings", "stream", True),
        ("embeddings", "n", 2),
        ("embeddings", "logprobs", 0),
        ("embeddings", "response_format", {"type": "json_object"}),
        ("embeddings", "tools", [{"type": "function"}]),
        ("embeddings", "top_k", 5),
        ("embeddings", "seed", 0),
        ("chat", "modalities", ["text", "audio"]),
        ("chat", "web_search_options", {}),
    ],
)
async def test_what_is_off_depends_on_the_field(
    client: httpx.AsyncClient, dialect: str, name: str, value: Any
) -> None:
    """False, 0 and {} are values like any other where they ask for something."""
    response = await client.post(DIALECTS[dialect][0], json=body_of(dialect, **{name: value}))
    assert response.status_code == 400, response.text
    assert f"{name} is not supported" in response.text


@pytest.mark.parametrize(
    ("dialect", "name", "words"),
    [
        ("responses", "max_new_tokens", "use max_output_tokens"),
        ("responses", "max_length", "use max_output_tokens"),
        ("messages", "stopping_strings", "use stop_sequences"),
        ("messages", "max_length", "use max_tokens"),
        ("parameters", "num_predict", "use max_new_tokens"),
        ("parameters", "min_length", "use min_new_tokens"),
        ("embeddings", "max_new_tokens", "nothing is generated"),
        ("chat", "max_length", "use max_tokens"),
        ("chat", "input", "/v1/responses takes input"),
        ("chat", "text", "use response_format"),
        ("completions", "output_format", "use response_format"),
        ("completions", "regular_constraint", "use guided_regex"),
        ("chat", "dimensions", "it is a field of embeddings"),
        ("chat", "previous_response_id", "send the whole conversation"),
        ("responses", "output_config", "use text.format"),
        ("messages", "text", "use output_config.format"),
        ("messages", "regular_constraint", "it is a field of chat and completions"),
        ("parameters", "text", "use grammar"),
        ("parameters", "guided_regex", "use regular_constraint"),
    ],
)
async def test_hints_name_what_the_dialect_has(
    client: httpx.AsyncClient, dialect: str, name: str, words: str
) -> None:
    response = await client.post(DIALECTS[dialect][0], json=body_of(dialect, **{name: 7}))
    assert words in response.text


@pytest.mark.parametrize("dialect", ["responses", "chat", "completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_options_of_a_stream(client: httpx.AsyncClient, dialect: str, stream: bool) -> None:
    """Those of the API are known; others are fields nobody has heard of."""
    path = DIALECTS[dialect][0]
    options = {"include_usage": True, "include_obfuscation": True, "new": [{}]}
    response = await client.post(path, json=body_of(dialect, stream=stream, stream_options=options))
    assert response.status_code == 200, response.text
    assert "obfuscation" not in response.text
    wrong: Any
    for wrong in ({"include_obfuscation": "yes"}, {"include_usage": 1}, [], "x", 5):
        response = await client.post(path, json=body_of(dialect, stream=stream, stream_options=wrong))
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("stream_options")


async def test_responses_have_their_counts_at_the_end(client: httpx.AsyncClient) -> None:
    body = {"input": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    response = await client.post("/v1/responses", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"
