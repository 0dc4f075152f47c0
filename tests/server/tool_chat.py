"""A chat whose answer is what the test says, with two tools, and how a model calls them in Hermes' format."""

import json
from typing import Any

import httpx

from server.schema.chat import ChatChunk, ChatResponse

URL = "/v1/chat/completions"
HERMES = "{{ messages }}{{ m.tool_calls }}{{ tools }}<tool_call>"
THINKING = HERMES + "<think>"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def body(say: str, *tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A request for an answer that is `say`."""
    messages = [{"role": "user", "content": f"say:{say}"}]
    return {"messages": messages, "tools": list(tools) or [TOOL, NOW], **fields}


async def answer(client: httpx.AsyncClient, say: str, *tools: dict[str, Any], **fields: Any) -> Any:
    response = await client.post(URL, json=body(say, *tools, **fields))
    assert response.status_code == 200, response.text
    ChatResponse.model_validate(response.json())
    return response.json()


async def chunks(client: httpx.AsyncClient, say: str, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post(URL, json=body(say, stream=True, **fields))
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    assert lines[-1] == "[DONE]"
    parsed = [json.loads(line) for line in lines[:-1]]
    for chunk in parsed:
        ChatChunk.model_validate(chunk)
    return parsed


async def error(client: httpx.AsyncClient, request: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(URL, json=request)
    assert response.status_code == 400, response.text
    found: dict[str, Any] = response.json()["error"]
    return found
