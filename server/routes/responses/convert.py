"""The items of a response's input -> the chat request with that prompt."""

from typing import Any

from pydantic import ValidationError

from engine.errors import InvalidRequest
from server.errors import invalid_request
from server.limits import check_text
from server.schema.chat import ChatRequest
from server.schema.response_items import LEFT_OUT, InputItem, InputPart
from server.schema.responses import ResponsesRequest, TextFormat
from server.schema.sampling import Sampling
from server.schema.tools import MAX_TOOL_CALLS

# Fields of chat as this API calls them, for errors.
NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}


def chat_request(wire: ResponsesRequest) -> ChatRequest:
    """Return the chat request with this conversation and sampling. Raises InvalidRequest."""
    messages: list[dict[str, Any]] = []
    if wire.instructions:
        check_text(wire.instructions, "instructions")
        messages.append({"role": "system", "content": wire.instructions})
    for number, item in enumerate(wire.input):
        check_item(item, f"input[{number}]")
        add_item(messages, item)
        if messages and len(messages[-1].get("tool_calls", ())) > MAX_TOOL_CALLS:
            raise InvalidRequest(f"a turn has {MAX_TOOL_CALLS} calls at most.", f"input[{number}]")
    fields = wire.model_dump(include=set(Sampling.model_fields)) | {
        "messages": messages,
        "max_tokens": wire.max_output_tokens,
        "reasoning_effort": wire.reasoning.effort if wire.reasoning else None,
        "stop": list(wire.stop) if wire.stop else None,
        "response_format": response_format(wire.text.format if wire.text else None),
        "tools": [tool.for_chat for tool in wire.tools or ()],
        "tool_choice": wire.tool_choice.for_chat if wire.tool_choice else None,
        "parallel_tool_calls": wire.parallel_tool_calls,
        "logprobs": wire.wants_logprobs,
        "top_logprobs": wire.top_logprobs,
    }
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:  # more turns than chat takes, with the instructions; tools' names
        raise invalid_request(error, fields, NAMES) from None


def response_format(form: TextFormat | None) -> dict[str, Any] | None:
    """The form of the answer as chat has it."""
    if form is None:
        return None
    if form.type != "json_schema":
        return {"type": form.type}
    return {"type": form.type, "json_schema": form.model_dump(include={"name", "schema_"}, by_alias=True)}


def check_item(item: InputItem, path: str) -> None:
    """Refuse NUL characters under their name in this API. Raises InvalidRequest."""
    for name in ("id", "call_id", "name", "arguments", "input"):
        check_text(getattr(item, name) or "", f"{path}.{name}")
    for name in ("content", "output"):
        for position, part in enumerate(getattr(item, name) or ()):
            check_text(part.plain_text, f"{path}.{name}[{position}]")


def add_item(messages: list[dict[str, Any]], item: InputItem) -> None:
    """Append what an item says; all that an assistant thought, said and called in a row is one turn."""
    if item.type in LEFT_OUT:
        return
    if item.is_output:
        add_output(messages, item)
        return
    if item.type == "message" and item.role != "assistant":
        messages.append({"role": item.role, "content": joined(item.content)})
        return
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    turn = messages[-1]
    if call := item.call:
        turn.setdefault("tool_calls", []).append(call)
        if item.type == "mcp_call" and item.output is not None:
            add_output(messages, item)
    else:
        name = "content" if item.type == "message" else "reasoning_content"
        text = joined(item.content)
        turn[name] = f"{turn[name]}\n{text}" if turn.get(name) else text


def add_output(messages: list[dict[str, Any]], item: InputItem) -> None:
    """Append the result of a call."""
    number = item.call_id or item.id
    messages.append({"role": "tool", "tool_call_id": number, "content": joined(item.output)})


def joined(parts: list[InputPart] | None) -> str:
    """The parts as one text, as chat joins them."""
    return "\n".join(part.plain_text for part in parts or ())
