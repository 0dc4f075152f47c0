"""Requests of the Responses API, and checks that its answers and streams have the shape of the API."""

import json
from typing import Any

import httpx
from openai.types.responses import Response as SdkResponse
from openai.types.responses import ResponseStreamEvent as SdkEvent
from pydantic import TypeAdapter

from server.schema.response_events import ResponseEvent
from server.schema.responses import ResponseObject

PATH = "/v1/responses"
SDK_EVENT: TypeAdapter[Any] = TypeAdapter(SdkEvent)
CODEX_TOOLS = [
    {"type": "web_search", "external_web_access": False},
    {"type": "local_shell"},
    {"type": "image_generation", "output_format": "png"},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
    {"type": "mcp", "server_label": "x", "server_url": "http://x"},
    {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", "name": "g"}]},
    {"type": "tool_search", "description": "d", "parameters": {"type": "object"}},
]


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(PATH, json=fields)
    assert response.status_code == 200, response.text
    ResponseObject.model_validate(response.json())
    SdkResponse.model_validate(response.json())
    answer: dict[str, Any] = response.json()
    return answer


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer; checks their framing and their numbers."""
    response = await client.post(PATH, json={**fields, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for number, frame in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        ResponseEvent.model_validate(event)
        SDK_EVENT.validate_python(event)
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        events.append(event)
    return events


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
