"""Requests of the Anthropic API, and checks that its answers and streams have the shape of the API."""

import json
from typing import Any

import httpx
from anthropic.types import Message as SdkMessage

from server.schema.message_events import Message, MessageEvent

PATH = "/v1/messages"
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "cache_control": {"type": "ephemeral"},
}
NOW = {"type": "custom", "name": "now", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}


def body(content: Any = "tokens=3", **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 100, "messages": [{"role": "user", "content": content}], **fields}


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(PATH, json=fields)
    assert response.status_code == 200, response.text
    Message.model_validate(response.json())
    SdkMessage.model_validate(response.json())
    answer: dict[str, Any] = response.json()
    return answer


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer; checks their framing."""
    response = await client.post(PATH, json={**fields, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for frame in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        MessageEvent.model_validate(events[-1])
        assert name == f"event: {events[-1]['type']}"
    return events
