"""Whatever is sent to any endpoint: an answer or a 4xx in its own envelope, never a fault, never a hang."""

import asyncio
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from server.endpoint import Endpoint
from server.routes.table import ENDPOINTS, REFUSED
from server.schema.generate_parameters import GenerateParameters
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine

POSTS = [endpoint for endpoint in ENDPOINTS if endpoint.request is not None]

# fmt: off
KINDS = [
    "user", "assistant", "system", "developer", "tool", "text", "image", "input_text", "output_text",
    "message", "reasoning", "function_call", "function_call_output", "tool_use", "tool_result", "thinking",
    "none", "auto", "json", "disabled", "enabled", "low", "fake-model",
]
FIELDS = [
    "type", "text", "role", "content", "id", "name", "input", "output", "arguments", "call_id", "tool_use_id",
    "function", "tool_calls", "thinking", "signature", "effort", "format", "schema", "1",
]
# fmt: on
WORDS = st.sampled_from([*KINDS, "", "a", "\0", "{}", "[]", "x" * 5000, "日本", "\ud7ff"])
NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2, 0.5, -0.0, 1e308, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1e-320]),
    st.integers(-10, 5000),
    st.floats(-3, 3),
)
NAMES = st.sampled_from(FIELDS)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


def field_names(model: type[BaseModel]) -> list[str]:
    return list(model.model_fields)


def bodies(endpoint: Endpoint) -> st.SearchStrategy[dict[str, Any]]:
    """The endpoint's example with some fields, known and refused ones, set to anything."""
    assert endpoint.request is not None
    names = st.sampled_from([*field_names(endpoint.request), *REFUSED[endpoint.request], "unheard_of"])
    changes = st.dictionaries(names, VALUES, min_size=1, max_size=4)
    parameters = st.sampled_from([*field_names(GenerateParameters), *REFUSED[GenerateParameters]])
    nested = st.dictionaries(parameters, VALUES, max_size=4)
    return st.builds(
        lambda changed, inner: {
            **(endpoint.example or {}),
            **({"parameters": inner} if "parameters" in field_names(endpoint.request) else {}),
            **changed,
        },
        changes,
        nested,
    )


@pytest.mark.parametrize("endpoint", POSTS, ids=[endpoint.paths[0] for endpoint in POSTS])
@pytest.mark.parametrize("generate_api", ["tgi", "lightllm"])
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_body_is_answered(endpoint: Endpoint, generate_api: str, data: st.DataObject) -> None:
    if generate_api == "lightllm" and "parameters" not in field_names(endpoint.request or BaseModel):
        return  # the setting is nothing to this endpoint
    body = data.draw(bodies(endpoint))

    async def send() -> httpx.Response:
        engine = FakeEngine()
        async with asyncio.timeout(10), client_for(engine, generate_api=generate_api) as client:
            response = await client.post(endpoint.paths[0], json=body)
        assert not engine.live, "nothing is left running"
        return response

    response = asyncio.run(send())
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        endpoint.envelope.schema.model_validate(response.json())
        assert len(response.content) < 3000
    elif response.headers["content-type"] == "application/json":
        assert endpoint.response is not None
        endpoint.response.model_validate(response.json())
    else:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert '"error":{' not in response.text
